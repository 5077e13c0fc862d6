"""Sparse attention in latent space, row by row: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sparse_attention_reference(
    q: Float[Tensor, "T H L"],
    latents: Float[Tensor, "N L"],
    pools: Int[Tensor, "T I"],
    slots: Int[Tensor, "T"],
    *,
    kpool: int,
    scale: float,
) -> tuple[Float[Tensor, "T H L"], Float[Tensor, "T I"]]:
    """o = softmax(scale q c^T) c over the visible latents c, and each selected pool's probability over all heads.

    The own incomplete pool is attended to but has no mass of its own.

    Source: DeepSeek-V2 (arXiv 2405.04434), eq. 9-15 with the key and value projections absorbed; DSA.
    """
    outputs, masses = [], []
    for t in range(len(q)):
        visible = _visible_slots(pools[t], int(slots[t]), kpool)
        seen = latents[visible]
        probabilities = torch.softmax(scale * q[t] @ seen.T, dim=-1)  # H N
        outputs.append(probabilities @ seen)
        mass = probabilities.new_zeros(pools.shape[1])
        used = [i for i, pool in enumerate(pools[t]) if pool >= 0]
        for rank, i in enumerate(used):
            mass[i] = probabilities[:, rank * kpool : (rank + 1) * kpool].sum()
        masses.append(mass)
    return torch.stack(outputs), torch.stack(masses)


def _visible_slots(pools: Tensor, slot: int, kpool: int) -> list[int]:
    """Slots a query may attend to: those of its selected pools, and its own incomplete pool up to itself."""
    slots = [int(pool) * kpool + j for pool in pools if pool >= 0 for j in range(kpool)]
    if slot % kpool != kpool - 1:
        slots += list(range(slot - slot % kpool, slot + 1))
    return slots
