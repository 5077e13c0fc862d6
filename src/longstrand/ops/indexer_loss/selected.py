"""The indexer's loss over each query's selected pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.native import Op

GATHER_BYTES = 4 << 20
SELECTED_LOSS = Op("selected_indexer_loss", "gathered")


def selected_indexer_loss(
    q: Float[Tensor, "T H D"],
    weights: Float[Tensor, "T H"],
    keys: Float[Tensor, "P D"],
    d_keys: Float[Tensor, "P D"],
    pools: Int[Tensor, "T I"],
    mass: Float[Tensor, "T I"],
) -> Float[Tensor, ""]:
    """Sum over rows of the KL between the attention's shares of the selected pools and the index scores there.

    Args:
        q, weights: float32 or wider; q scaled by D^-0.5.
        d_keys: backward *adds* the pool keys' gradient into it.
        pools: -1 where unused; a row without any counts 0.
        mass: attention probability of each selected pool summed over heads, 0 in unused slots; renormalised here.

    Transients: GATHER_BYTES and a few blocks of scores.
    """
    SELECTED_LOSS.in_kernel(q=q, weights=weights, keys=keys, d_keys=d_keys, pools=pools)
    total = mass.sum(-1, keepdim=True)
    target = torch.where(total > 0, mass / total, 0).to(q.dtype)
    return _SelectedLoss.apply(q, weights, keys, d_keys, pools, target)


class _SelectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, weights: Tensor, keys: Tensor, d_keys: Tensor, pools: Tensor, target: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q, weights, keys, pools, target)
        ctx.d_keys = d_keys  # not saved: it is added to between forward and backward
        loss = q.new_zeros(())
        for rows, gathered, _ in _blocks(q, keys, pools):
            scores = torch.einsum("th,thi->ti", weights[rows], torch.bmm(q[rows], gathered.mT).relu_())
            logprobs = _masked_logprobs(scores, pools[rows])
            wanted = target[rows]
            loss += (torch.xlogy(wanted, wanted) - wanted * logprobs).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        q, weights, keys, pools, target = ctx.saved_tensors
        d_keys = ctx.d_keys
        dq, d_weights = torch.empty_like(q), torch.empty_like(weights)
        for rows, gathered, ids in _blocks(q, keys, pools):
            active = torch.bmm(q[rows], gathered.mT).relu_()  # T H I
            scores = torch.einsum("th,thi->ti", weights[rows], active)
            predicted = _masked_logprobs(scores, pools[rows]).exp().masked_fill(pools[rows] < 0, 0)
            has_target = target[rows].sum(-1, keepdim=True) > 0
            d_scores = torch.where(has_target, predicted - target[rows], 0) * d_loss
            d_weights[rows] = torch.einsum("ti,thi->th", d_scores, active)
            d_products = d_scores.unsqueeze(1) * weights[rows].unsqueeze(-1) * (active > 0)
            torch.bmm(d_products, gathered, out=dq[rows])
            d_keys.index_add_(0, ids, torch.bmm(d_products.mT, q[rows]).flatten(0, 1).to(d_keys.dtype))
        return dq, d_weights, None, None, None, None


def _blocks(q: Tensor, keys: Tensor, pools: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    step = max(1, GATHER_BYTES // (pools.shape[1] * keys.shape[1] * q.element_size()))
    for start in range(0, len(q), step):
        rows = slice(start, start + step)
        ids = pools[rows].long().clamp(min=0).flatten()
        yield rows, keys.index_select(0, ids).to(q.dtype).view(-1, pools.shape[1], keys.shape[1]), ids


def _masked_logprobs(scores: Tensor, pools: Tensor) -> Tensor:
    """Log-softmax over the used slots; 0 in unused ones."""
    logprobs = scores.masked_fill(pools < 0, -torch.inf).log_softmax(-1)
    return logprobs.masked_fill(pools < 0, 0)
