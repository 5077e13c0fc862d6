"""Inputs for the indexer's loss: rows without a pool, a target with zeros, ties at relu = 0, documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class IndexerLossCase:
    """Documents of the given lengths; `zeros` is the part of pools without any attention."""

    name: str
    lengths: tuple[int, ...]
    kpool: int = 4
    heads: int = 3
    width: int = 5
    zeros: float = 0.0
    size: float = 1.0


CASES = (
    *(IndexerLossCase(f"{length} tokens", (length,)) for length in (1, 3, 4, 5, 29)),
    IndexerLossCase("documents", (1, 3, 21, 2, 13)),
    IndexerLossCase("pools without attention", (41,), zeros=0.6),
    IndexerLossCase("sharp scores", (37,), size=5.0),
    IndexerLossCase("one head, pools of one token", (11, 6), kpool=1, heads=1),
)


def draw(case: IndexerLossCase, seed: int = 0) -> dict[str, Tensor]:
    """q, weights, keys, first_pool, num_visible in float64, and the full target [T, P]: rows sum to 1 or 0."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return case.size * torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor(case.lengths)
    pools = -(-lengths // case.kpool)
    first_pool = (pools.cumsum(0) - pools).repeat_interleave(lengths)
    num_visible = (torch.cat([torch.arange(length) for length in case.lengths]) + 1) // case.kpool
    ids = torch.arange(int(pools.sum()))
    visible = (ids >= first_pool[:, None]) & (ids < (first_pool + num_visible)[:, None])
    mass = torch.rand(visible.shape, generator=generator, dtype=torch.float64)
    kept = torch.rand(visible.shape, generator=generator) >= case.zeros
    kept |= ids == (first_pool + num_visible - 1)[:, None]  # a row that sees a pool attends to one
    mass = mass * visible * kept
    total = mass.sum(-1, keepdim=True)
    return {
        "q": noise(len(first_pool), case.heads, case.width),
        "weights": noise(len(first_pool), case.heads),
        "keys": noise(len(ids), case.width),
        "first_pool": first_pool,
        "num_visible": num_visible,
        "target": torch.where(total > 0, mass / total, 0),
    }
