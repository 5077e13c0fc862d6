"""Experts spread over ranks: tokens go to where their experts are, in rounds that bound what a rank receives.

Rank e of an axis of n holds the experts [e E / n, (e + 1) E / n). A pair is a token and one of its experts: a row of x
that goes out, and a row that comes back. All ranks know how many pairs each rank has for each expert, so all cut the
same rounds, in which no rank receives more than `Spread.receive` rows, neither for its experts nor for its tokens,
however skewed the choice is. A round is a recompute unit of its own: what it held is freed before the next one, and
backward sends its rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.precision import wide, wide_dtype
from longstrand.parallel.axis import Axis
from longstrand.plan.rules import require_a_row_of_each, require_divisor_of_experts

Compute = Callable[..., Tensor]
"""compute(rows [N, D], local ids [N], *params): each row's expert applied to it [N, D]; never called with no row."""


@dataclass
class Spread:
    """How experts are spread over an axis.

    Args:
        axis: the ranks that hold all experts once.
        num_experts: of all ranks; a multiple of the axis's size.
        receive: rows that a rank may receive in a round.

    Attributes:
        largest_received: most rows that this rank received in one round so far, its own among them.
        num_rounds: rounds so far, forward and backward.
    """

    axis: Axis
    num_experts: int
    receive: int
    largest_received: int = 0
    num_rounds: int = 0

    def __post_init__(self) -> None:
        require_divisor_of_experts(self.axis.size, self.num_experts)
        require_a_row_of_each(self.receive, self.axis.size)

    @property
    def per_rank(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.axis.size

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.axis.rank * self.per_rank


def experts_over(
    spread: Spread,
    x: Float[Tensor, "T D"],
    ids: Int[Tensor, "T A"],
    weights: Float[Tensor, "T A"],
    compute: Compute,
    params: Sequence[Tensor],
) -> Float[Tensor, "T D"]:
    """Weighted sum of each token's experts, wherever they are: sum_a weights[t, a] expert_{ids[t, a]}(x_t).

    All ranks of the axis call it, and walk it back, in the same order; one without tokens (T = 0) takes part. Every
    pair is computed. The gradients of `params` hold the sums over all ranks of the axis, in float32 or wider.

    Kept for backward: x, ids, weights and n x E counts, whatever the number of rounds. A round holds `receive` rows of
    D values that came (3 D in backward), what `compute` takes for them, and `receive` rows that came back; beside it
    T x D values in float32 or wider. What moves per pair of a token whose expert is elsewhere: D there and D back, and
    in backward 2 D + 1 there and D + 1 back.

    Args:
        ids: global.
        compute: with the experts of this rank; in backward it is called again, with a graph.
        params: what `compute` takes beside rows, whose gradients are wanted.
    """
    return _ExpertsOver.apply(x, ids, weights, spread, compute, *params)


class _ExpertsOver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, spread: Spread, compute: Compute, *params: Tensor
    ) -> Tensor:
        counts = _count(spread, ids)
        ctx.save_for_backward(x, ids, weights, *params)
        ctx.spread, ctx.compute, ctx.counts = spread, compute, counts
        out = torch.zeros_like(x, dtype=wide_dtype(x.dtype))
        scale = weights.reshape(-1, 1).to(out.dtype)
        for each in _rounds(spread, counts, ids):
            rows = each.send(x[each.tokens], "expert tokens")
            if len(rows):
                rows = compute(rows, each.local_ids, *params)
            out.index_add_(0, each.tokens, each.send_back(rows, "expert outputs") * scale[each.pairs])
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, ids, weights, *params = ctx.saved_tensors
        dtype, width = wide_dtype(x.dtype), x.shape[1]
        dx = torch.zeros_like(x, dtype=dtype)
        d_weights = torch.zeros(ids.numel(), dtype=dtype, device=x.device)
        leaves = [_leaf(each) for each in params]
        scale = weights.reshape(-1, 1).to(dtype)
        for each in _rounds(ctx.spread, ctx.counts, ids):
            sent = torch.cat([x[each.tokens], d_out[each.tokens], _as_columns(scale[each.pairs], x.dtype)], 1)
            rows = each.send(sent, "expert gradients")
            del sent
            came = each.send_back(_round_back(ctx.compute, rows, each.local_ids, leaves), "expert gradients")
            dx.index_add_(0, each.tokens, came[:, :width].to(dtype))
            d_weights[each.pairs] = _from_columns(came[:, width:], dtype)[:, 0]
        grads = [_gradient(leaf) for leaf in leaves]
        return dx.to(x.dtype), None, d_weights.view_as(weights).to(weights.dtype), None, None, *grads


def _round_back(compute: Compute, came: Tensor, local_ids: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Gradients of a round's rows and, beside them, of their weights; `leaves` accumulate theirs.

    A weight's gradient, d_out . expert(x), needs both rows at once: they meet here, and one number goes back.

    Args:
        came: rows of x, of d_out, and their weights.
    """
    dtype = wide_dtype(came.dtype)
    columns = dtype.itemsize // came.dtype.itemsize
    width = (came.shape[1] - columns) // 2
    if not len(came):
        return came.new_empty(0, width + columns)
    rows, d_out = came[:, :width].clone().requires_grad_(), came[:, width : 2 * width]
    scale = _from_columns(came[:, 2 * width :], dtype)
    with torch.enable_grad():
        out = compute(rows, local_ids, *leaves)
    d_scale = (out.detach().to(dtype) * d_out).sum(1, keepdim=True)
    torch.autograd.backward([out], [(scale * d_out).to(out.dtype)])
    assert rows.grad is not None
    return torch.cat([rows.grad, _as_columns(d_scale, came.dtype)], 1)


@dataclass(frozen=True)
class _Round:
    """What this rank sends and receives in one round.

    Attributes:
        pairs: flat indices into ids of what it sends, in the order of their ranks and experts.
        tokens: their rows of x.
        local_ids: the expert of each row that comes, counted from the first of this rank.
    """

    spread: Spread
    pairs: Tensor
    tokens: Tensor
    local_ids: Tensor
    num_sent: list[int]
    num_received: list[int]

    def send(self, rows: Tensor, what: str) -> Tensor:
        """To the experts."""
        return self._exchange(rows, self.num_sent, self.num_received, what)

    def send_back(self, rows: Tensor, what: str) -> Tensor:
        """To the tokens."""
        return self._exchange(rows, self.num_received, self.num_sent, what)

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int], what: str) -> Tensor:
        self.spread.largest_received = max(self.spread.largest_received, sum(receive))
        return self.spread.axis.exchange(rows, send, receive, what)


def _count(spread: Spread, ids: Tensor) -> np.ndarray:
    """Pairs of each rank for each expert, as all ranks know them."""
    own = torch.bincount(ids.flatten().long(), minlength=spread.num_experts).int()
    assert len(own) == spread.num_experts, "an expert id beyond the experts"
    counts = spread.axis.gather(own, "expert counts").view(-1, spread.num_experts)
    return counts.cpu().numpy().astype(np.int64)


def _rounds(spread: Spread, counts: np.ndarray, ids: Tensor) -> Iterator[_Round]:
    """This rank's part of all rounds; the same number of them on every rank."""
    rank, size, own = spread.axis.rank, spread.axis.size, slice(spread.first, spread.first + spread.per_rank)
    order = ids.flatten().argsort(stable=True)  # by expert, so by rank
    cells = counts.reshape(size, size, -1).sum(2)  # source, destination
    first = np.cumsum(cells[rank]) - cells[rank]
    ends = np.cumsum(counts[:, own], axis=1)  # of each expert here, among the rows of a source
    cuts = plan_rounds(cells, spread.receive)
    for before, after in pairwise(cuts):
        parts = [order[a:b] for a, b in zip(first + before[rank], first + after[rank], strict=True)]
        local = [
            np.searchsorted(ends[source], np.arange(before[source, rank], after[source, rank]), side="right")
            for source in range(size)
        ]
        pairs, sizes = torch.cat(parts), after - before
        spread.num_rounds += 1
        yield _Round(
            spread,
            pairs,
            pairs // ids.shape[1],
            torch.from_numpy(np.concatenate(local)).to(ids.device),
            sizes[rank].tolist(),
            sizes[:, rank].tolist(),
        )


def plan_rounds(cells: np.ndarray, receive: int) -> np.ndarray:
    """Where each round begins in the pairs of each source for each destination, and the ends: [rounds + 1, n, n].

    Every round takes the same share of all cells, to a pair: as few rounds as keep each row and each column of a round
    within `receive` (or an eighth more than that). With a pair per cell the sums are n at most.

    Args:
        cells: number of pairs by source and destination.
        receive: n or more.
    """
    most = max(cells.sum(0).max(), cells.sum(1).max())
    rounds = int(-(-most // receive))
    while True:
        cuts = cells * np.arange(rounds + 1)[:, None, None] // max(rounds, 1)
        sizes = np.diff(cuts, axis=0)
        if rounds == 0 or max(sizes.sum(1).max(), sizes.sum(2).max()) <= receive:
            return cuts
        rounds = min(rounds + max(1, rounds // 8), int(cells.max()))


def _leaf(param: Tensor) -> Tensor:
    """A parameter's values with a gradient of their own, added up over rounds in float32 or wider."""
    leaf = param.detach().requires_grad_(param.requires_grad)
    if leaf.requires_grad:
        leaf.grad_dtype = wide_dtype(leaf.dtype)
    return leaf


def _gradient(leaf: Tensor) -> Tensor | None:
    """Exactly 0 where no row came; None for a frozen parameter."""
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf, dtype=wide_dtype(leaf.dtype)) if leaf.grad is None else leaf.grad


def _as_columns(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a column of float32 or wider, as columns of a dtype that is no wider."""
    return wide(values).contiguous().view(dtype)


def _from_columns(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """`_as_columns` undone; on a copy, which begins where a wider value may."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)
