"""Inputs for attention to selected pools: unused slots in any order, complete and open own pools, documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseCase:
    """Documents of the given lengths; `size` is that of queries and latents."""

    name: str
    lengths: tuple[int, ...]
    kpool: int = 4
    num_selected: int = 3
    heads: int = 3
    width: int = 5
    size: float = 1.0


CASES = (
    *(SparseCase(f"{length} tokens", (length,)) for length in (1, 3, 4, 5, 23)),
    SparseCase("documents", (1, 2, 3, 4, 13, 5)),
    SparseCase("pools of one token", (9, 4), kpool=1),
    SparseCase("more slots than pools", (11,), num_selected=9),
    SparseCase("sharp", (37,), size=6.0),
)


def draw(case: SparseCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensor arguments of `sparse_attention` in float64, without `d_latents`.

    Each row selects random visible pools of its document; unused slots (-1) stand anywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    slots, pools, first = [], [], 0
    for length in case.lengths:
        for offset in range(length):
            visible = (offset + 1) // case.kpool
            chosen = first + torch.randperm(visible, generator=generator)[: case.num_selected]
            unused = torch.full((case.num_selected - len(chosen),), -1)
            order = torch.randperm(case.num_selected, generator=generator)
            pools.append(torch.cat([chosen, unused])[order])
            slots.append(first * case.kpool + offset)
        first += -(-length // case.kpool)

    def noise(*shape: int) -> Tensor:
        return case.size * torch.randn(*shape, generator=generator, dtype=torch.float64)

    latents = torch.zeros(first * case.kpool, case.width, dtype=torch.float64)
    latents[slots] = noise(len(slots), case.width)
    return {
        "q": noise(len(slots), case.heads, case.width),
        "latents": latents,
        "pools": torch.stack(pools).int(),
        "slots": torch.tensor(slots),
    }
