"""Dense attention in latent space, a block of pools at a time; forward only (in warm-up only the indexer learns)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.native import Op
from longstrand.ops.precision import wide, wide_dtype
from longstrand.ops.select import unseen

POOL_BLOCK = 256
DENSE = Op("dense_attention", "blockwise")


@dataclass(frozen=True)
class DenseAttention:
    """Outputs, and what turns a score into a share of its pool."""

    out: Float[Tensor, "T H L"]
    normaliser: Float[Tensor, "T H"]  # log-sum-exp over all visible tokens
    complete: Float[Tensor, "T"]  # probability over heads that lies in complete pools


def dense_attention(
    q: Float[Tensor, "T H L"],
    latents: Float[Tensor, "N L"],
    slots: Int[Tensor, "T"],
    first_pool: Int[Tensor, "T"],
    num_visible: Int[Tensor, "T"],
    *,
    kpool: int,
    scale: float,
) -> DenseAttention:
    """Attention of each query to its document up to itself; see `dense_attention_reference`.

    Transients: T x H x POOL_BLOCK x kpool scores.
    """
    DENSE.in_kernel(q=q, latents=latents, kpool=kpool)
    peak = q.new_full(q.shape[:2], -torch.inf, dtype=wide_dtype(q.dtype))
    total = torch.zeros_like(peak)
    out = torch.zeros_like(q, dtype=peak.dtype)
    for pools, scores in _complete_blocks(q, latents, first_pool, num_visible, kpool, scale):
        values = latents[pools.start * kpool : pools.stop * kpool]
        new_peak = torch.maximum(peak, scores.amax(-1))
        shift = torch.where(new_peak == -torch.inf, 0, new_peak)
        weights = (scores - shift.unsqueeze(-1)).exp_()
        rescale = (peak - shift).exp()
        total = total * rescale + weights.sum(-1)
        out = out * rescale.unsqueeze(-1) + (weights.to(q.dtype).flatten(0, 1) @ values).view_as(out)
        peak = new_peak
    complete = total.log() + peak
    tail_scores, tail_latents = _tail(q, latents, slots, kpool, scale)
    normaliser = torch.logaddexp(complete, tail_scores.logsumexp(-1))
    shift = torch.where(peak == -torch.inf, 0, peak)
    out = out * (shift - normaliser).exp().unsqueeze(-1)
    tail = (tail_scores - normaliser.unsqueeze(-1)).exp()
    out = out + torch.bmm(tail.to(q.dtype), tail_latents)
    return DenseAttention(out.to(q.dtype), normaliser, (complete - normaliser).exp().sum(-1))


def pool_masses(
    q: Float[Tensor, "T H L"],
    latents: Float[Tensor, "N L"],
    first_pool: Int[Tensor, "T"],
    num_visible: Int[Tensor, "T"],
    attention: DenseAttention,
    *,
    kpool: int,
    scale: float,
) -> Iterator[tuple[slice, Float[Tensor, "T P"]]]:
    """Yields block after block of pools with each one's share of the attention: the indexer's target."""
    for pools, scores in _complete_blocks(q, latents, first_pool, num_visible, kpool, scale):
        probabilities = (scores - attention.normaliser.unsqueeze(-1)).exp_()
        mass = probabilities.sum(1).unflatten(-1, (-1, kpool)).sum(-1)
        share = mass / attention.complete[:, None]
        yield pools, torch.where(attention.complete[:, None] > 0, share, 0)


def _complete_blocks(
    q: Tensor, latents: Tensor, first_pool: Tensor, num_visible: Tensor, kpool: int, scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (pools, scores [T, H, pools x kpool]) with -inf where a row does not see the pool."""
    begin, end = int(first_pool.min()), int((first_pool + num_visible).max())
    for start in range(begin, end, POOL_BLOCK):
        pools = slice(start, min(start + POOL_BLOCK, end))
        ids = torch.arange(pools.start, pools.stop, device=q.device)
        hidden = unseen(ids, first_pool, num_visible)
        scores = wide(q.flatten(0, 1) @ latents[pools.start * kpool : pools.stop * kpool].T) * scale
        scores = scores.view(*q.shape[:2], -1)
        yield pools, scores.masked_fill_(hidden.repeat_interleave(kpool, -1).unsqueeze(1), -torch.inf)


def _tail(q: Tensor, latents: Tensor, slots: Tensor, kpool: int, scale: float) -> tuple[Tensor, Tensor]:
    """Scores [T, H, kpool] and latents of the own pool; all hidden when it is complete."""
    inside = torch.arange(kpool, device=q.device)
    own = slots % kpool
    seen = latents.view(-1, kpool, latents.shape[-1])[slots // kpool]
    hidden = (inside > own[:, None]) | (own == kpool - 1)[:, None]
    scores = wide(torch.bmm(q, seen.mT)) * scale
    return scores.masked_fill(hidden.unsqueeze(1), -torch.inf), seen
