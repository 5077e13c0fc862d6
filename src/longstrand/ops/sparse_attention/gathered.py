"""Sparse attention by gathering whole pools of latents, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.native import SUFFIX, Op, call, refusal, require, require_contiguous
from longstrand.ops.precision import wide, wide_dtype

GATHER_BYTES = 4 << 20
"""One block's gathered latents; above this they fall out of the cache (17 against 0.8 us/token, 1 thread)."""

SPARSE = Op(
    "sparse_attention",
    "gathered",
    "sparse_attention_",
    lambda q, latents, d_latents, pools, kpool: refusal(q, latents),
)


def sparse_attention(
    q: Float[Tensor, "T H L"],
    latents: Float[Tensor, "N L"],
    d_latents: Float[Tensor, "N L"] | None,
    pools: Int[Tensor, "T I"],
    slots: Int[Tensor, "T"],
    *,
    kpool: int,
    scale: float,
) -> tuple[Float[Tensor, "T H L"], Float[Tensor, "T I"]]:
    """Attention to the selected pools and the own incomplete one; see `sparse_attention_reference`.

    Args:
        q: queries in latent space (the key projection absorbed).
        latents: the buffer of the whole scan, a multiple of kpool rows; rows that no token fills are zero.
        d_latents: float32 or wider, same shape: backward *adds* the latents' gradient into it (the rows in use only).
            None under `no_grad`.
        pools: selected pools, -1 where unused.
        slots: row of each query's own token in `latents`.

    Returns: outputs, and the probability mass of each selected pool summed over heads (no gradient).
    Transients: 2 x GATHER_BYTES and a few blocks of scores; the kernel's are 2 H ((I + 1) kpool + L) values for each of
    64 tokens.
    """
    native = SPARSE.in_kernel(q=q, latents=latents, d_latents=d_latents, pools=pools, kpool=kpool)
    form = _NativeSparseAttention if native else _SparseAttention
    return form.apply(q, latents, d_latents, pools, slots, kpool, scale)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latents: Tensor,
        d_latents: Tensor | None,
        pools: Tensor,
        slots: Tensor,
        kpool: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        mass = q.new_empty(pools.shape, dtype=wide_dtype(q.dtype))
        for rows, gathered, _, hidden in _blocks(q, latents, pools, slots, kpool):
            probabilities = _probabilities(q[rows], gathered, hidden, scale)
            torch.bmm(probabilities.to(q.dtype), gathered, out=out[rows])
            shaped = probabilities.unflatten(-1, (-1, kpool))[:, :, :-1]
            mass[rows] = shaped.sum(dim=(1, 3))
        ctx.save_for_backward(q, latents, pools, slots)
        ctx.d_latents = d_latents  # not saved: it is added to between forward and backward
        ctx.kpool, ctx.scale = kpool, scale
        ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, latents, pools, slots = ctx.saved_tensors
        d_latents = ctx.d_latents
        kpool, scale = ctx.kpool, ctx.scale
        dq = torch.empty_like(q)
        d_pools = d_latents.view(-1, kpool * latents.shape[-1])
        for rows, gathered, ids, hidden in _blocks(q, latents, pools, slots, kpool):
            probabilities = _probabilities(q[rows], gathered, hidden, scale)
            d_probabilities = torch.bmm(d_out[rows], gathered.mT).to(probabilities.dtype)
            d_scores = d_probabilities.mul_(probabilities)
            d_scores.addcmul_(probabilities, d_scores.sum(-1, keepdim=True), value=-1).mul_(scale)
            torch.bmm(d_scores.to(q.dtype), gathered, out=dq[rows])
            left = torch.cat([d_scores, probabilities], dim=1).to(q.dtype)  # T 2H N
            right = torch.cat([q[rows], d_out[rows]], dim=1)
            d_gathered = torch.bmm(left.mT, right)
            d_pools.index_add_(0, ids, d_gathered.view(len(ids), -1).to(d_pools.dtype))
        return dq, None, None, None, None, None, None


def _blocks(
    q: Tensor, latents: Tensor, pools: Tensor, slots: Tensor, kpool: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yields per block of queries: its rows, latents [t, (I + 1) kpool, L], pool ids flat, what is hidden [t, 1, N]."""
    width = latents.shape[-1]
    by_pool = latents.view(-1, kpool * width)
    per_query = (pools.shape[1] + 1) * kpool * width * latents.element_size()
    step = max(1, GATHER_BYTES // per_query)
    inside = torch.arange(kpool, device=q.device)
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        slot = slots[rows, None]
        ids = torch.cat([pools[rows].long(), slot // kpool], dim=-1)
        hidden = (ids < 0).unsqueeze(-1).expand(-1, -1, kpool).clone()
        own = slot % kpool
        hidden[:, -1] = (inside > own) | (own == kpool - 1)  # a complete own pool is seen only when selected
        ids = ids.clamp(min=0).flatten()  # an unused slot reads pool 0 and is hidden
        gathered = by_pool.index_select(0, ids).view(len(slot), -1, width)
        yield rows, gathered, ids, hidden.flatten(1).unsqueeze(1)


def _probabilities(q: Tensor, gathered: Tensor, hidden: Tensor, scale: float) -> Tensor:
    scores = wide(torch.bmm(q, gathered.mT).mul_(scale))
    return scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1)


class _NativeSparseAttention(torch.autograd.Function):
    """The same without gathering: scores, probabilities and sums of a token stay in cache; see kernel.cpp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latents: Tensor,
        d_latents: Tensor | None,
        pools: Tensor,
        slots: Tensor,
        kpool: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        q, pools, slots = q.contiguous(), pools.int().contiguous(), slots.long().contiguous()
        require(tuple(q.shape[:1]), torch.int64, slots=slots)
        require(tuple(q.shape[:1]), torch.int32, pools=pools[:, 0])
        whole_pools = (latents.shape[0] // kpool * kpool, q.shape[2])
        require(whole_pools, q.dtype, latents=latents)
        require(whole_pools, torch.float32, d_latents=d_latents)
        require_contiguous(latents=latents, d_latents=d_latents)
        out, mass = torch.empty_like(q), q.new_empty(pools.shape, dtype=torch.float32)
        ctx.sizes = (*q.shape, pools.shape[1], kpool, float(scale))
        call(f"sparse_attention_forward_{SUFFIX[q.dtype]}", q, latents, pools, slots, *ctx.sizes, out, mass)
        ctx.save_for_backward(q, latents, pools, slots)
        ctx.d_latents = d_latents  # not saved: it is added to between forward and backward
        ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, latents, pools, slots = ctx.saved_tensors
        d_latents = ctx.d_latents
        dq = torch.empty_like(q)
        call(
            f"sparse_attention_backward_{SUFFIX[q.dtype]}",
            *(q, latents, pools, slots, d_out.contiguous(), *ctx.sizes, dq, d_latents),
        )
        return dq, None, None, None, None, None, None
