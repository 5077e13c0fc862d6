"""Dense attention and the mass of each pool, row by row: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def dense_attention_reference(
    q: Float[Tensor, "T H L"],
    latents: Float[Tensor, "N L"],
    slots: Int[Tensor, "T"],
    first_pool: Int[Tensor, "T"],
    *,
    kpool: int,
    scale: float,
) -> tuple[Float[Tensor, "T H L"], Float[Tensor, "T P"]]:
    """softmax(scale q c^T) c over all tokens of the document up to the query, and the share of each complete pool.

    The share sums the heads' probabilities over the pool's tokens; the incomplete pool is left out and the rest
    renormalised to 1 (a row without a complete pool is zero).
    """
    outputs, shares = [], []
    for t in range(len(q)):
        begin, slot = int(first_pool[t]) * kpool, int(slots[t])
        seen = latents[begin : slot + 1]
        probabilities = torch.softmax(scale * q[t] @ seen.T, dim=-1)
        outputs.append(probabilities @ seen)
        share = probabilities.new_zeros(len(latents) // kpool)
        num_complete = len(seen) // kpool
        mass = probabilities[:, : num_complete * kpool].reshape(len(q[t]), num_complete, kpool).sum((0, 2))
        share[int(first_pool[t]) : int(first_pool[t]) + num_complete] = mass / mass.sum()
        shares.append(share)
    return torch.stack(outputs), torch.stack(shares)
