"""Inputs for dense attention in latent space: documents shorter than a pool, sharp scores, pools of one token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseCase:
    """Documents of the given lengths; `size` is that of queries and latents."""

    name: str
    lengths: tuple[int, ...]
    kpool: int = 4
    heads: int = 3
    width: int = 5
    size: float = 1.0


CASES = (
    *(DenseCase(f"{length} tokens", (length,)) for length in (1, 3, 4, 5, 23)),
    DenseCase("documents", (1, 2, 3, 4, 13, 5)),
    DenseCase("pools of one token", (9, 4), kpool=1),
    DenseCase("pools of sixteen", (5, 37), kpool=16),
    DenseCase("sharp", (37,), size=6.0),
)


def draw(case: DenseCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensor arguments of `dense_attention` in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return case.size * torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor(case.lengths)
    pools = -(-lengths // case.kpool)
    first_pool = (pools.cumsum(0) - pools).repeat_interleave(lengths)
    offsets = torch.cat([torch.arange(length) for length in case.lengths])
    slots = first_pool * case.kpool + offsets
    latents = torch.zeros(int(pools.sum()) * case.kpool, case.width, dtype=torch.float64)
    latents[slots] = noise(len(slots), case.width)
    return {
        "q": noise(len(slots), case.heads, case.width),
        "latents": latents,
        "slots": slots,
        "first_pool": first_pool,
        "num_visible": (offsets + 1) // case.kpool,
    }
