"""Routed experts: tokens sorted by expert, one matrix product per expert that has any."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.native import SUFFIX, Op, call, refusal, require
from longstrand.ops.precision import wide
from longstrand.ops.swiglu import swiglu, swiglu_backward, swiglu_forward
from longstrand.plan.rounds import fill_step

EXPERTS = Op(
    "experts",
    "grouped",
    "experts_",
    lambda x, ids, weights, gate_up, down: refusal(x, gate_up, down),
)


def experts(
    x: Float[Tensor, "T D"],
    ids: Int[Tensor, "T A"],
    weights: Float[Tensor, "T A"],
    gate_up: Float[Tensor, "E F2 D"],
    down: Float[Tensor, "E D F"],
    limit: float,
) -> Float[Tensor, "T D"]:
    """Weighted sum of each token's experts; see `experts_reference`.

    An expert without tokens is skipped and its gradient is exactly zero. Transients: A x T x (2 D + 3 F) values.
    """
    if EXPERTS.in_kernel(x=x, ids=ids, weights=weights, gate_up=gate_up, down=down):
        return _NativeExperts.apply(x, ids, weights, gate_up, down, limit)
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten().long(), minlength=len(gate_up)).tolist()
    grouped = x.index_select(0, order // ids.shape[1]).split(counts)
    outputs = []
    # Unbound once: each indexing would fill a gradient of all experts' size on its way back.
    for rows, first, second in zip(grouped, gate_up.unbind(), down.unbind(), strict=True):
        if len(rows):
            outputs.append(swiglu(rows @ first.T, limit) @ second.T)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    per_choice = torch.cat(outputs).index_select(0, back).view(*ids.shape, -1)  # T A D
    return torch.bmm(weights.to(x.dtype).unsqueeze(1), per_choice).squeeze(1)


class _NativeExperts(torch.autograd.Function):
    """The same with kernels for the grouping; keeps each choice's input, hidden row and output, with the tile."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float
    ) -> Tensor:
        x, ids, weights = x.contiguous(), ids.long().contiguous(), wide(weights).contiguous()
        require(tuple(ids.shape), torch.float32, weights=weights)
        require((len(gate_up), x.shape[1], gate_up.shape[1] // 2), x.dtype, down=down)
        require((len(gate_up), 2 * down.shape[2], x.shape[1]), x.dtype, gate_up=gate_up)
        require((len(x),), torch.int64, ids=ids[:, 0])
        sizes, suffix = (*ids.shape, x.shape[1]), SUFFIX[x.dtype]
        place, groups, grouped = _grouped(x, ids, len(gate_up))
        call(f"experts_gather_{suffix}", x, place, *sizes, grouped)
        both, rows = x.new_empty(len(grouped), gate_up.shape[1]), torch.empty_like(grouped)
        for expert, group in groups:
            torch.mm(grouped[group], gate_up[expert].T, out=both[group])
        hidden = swiglu_forward(both, limit)
        for expert, group in groups:
            torch.mm(hidden[group], down[expert].T, out=rows[group])
        out = torch.empty_like(x)
        call(f"experts_combine_{suffix}", rows, place, weights, *sizes, out)
        ctx.save_for_backward(grouped, both, hidden, rows, place, weights, gate_up, down)
        ctx.groups, ctx.sizes, ctx.limit = groups, sizes, limit
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        grouped, both, hidden, rows, place, weights, gate_up, down = ctx.saved_tensors
        trains = ctx.needs_input_grad
        d_rows, d_weights, suffix = _rows_like(rows, len(rows)), torch.empty_like(weights), SUFFIX[rows.dtype]
        d_out = d_out.contiguous()
        call(
            f"experts_combine_backward_{suffix}",
            *(rows, place, weights, d_out, *ctx.sizes, d_rows, d_weights),
        )
        d_gate_up = torch.zeros_like(gate_up) if trains[3] else None
        d_down = torch.zeros_like(down) if trains[4] else None
        d_hidden = torch.empty_like(hidden)
        for expert, group in ctx.groups:
            torch.mm(d_rows[group], down[expert], out=d_hidden[group])
            if d_down is not None:
                torch.mm(d_rows[group].T, hidden[group], out=d_down[expert])
        d_both = swiglu_backward(both, d_hidden, ctx.limit)
        d_grouped = rows  # no longer needed: overwritten
        for expert, group in ctx.groups:
            torch.mm(d_both[group], gate_up[expert], out=d_grouped[group])
            if d_gate_up is not None:
                torch.mm(d_both[group].T, grouped[group], out=d_gate_up[expert])
        dx = torch.empty_like(d_out)
        call(f"experts_combine_{suffix}", d_grouped, place, None, *ctx.sizes, dx)
        return dx, None, d_weights, d_gate_up, d_down, None


def rows_taken(tokens: int, dtype: torch.dtype) -> int:
    """Rows of an expert with so many tokens: in bfloat16 filled up to one of 8 numbers between two powers of two.

    oneDNN, which multiplies bfloat16, compiles and keeps code for every new shape, and numbers of tokens ever change.
    """
    if dtype != torch.bfloat16:
        return tokens
    step = fill_step(tokens)
    return -(-tokens // step) * step


def _grouped(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, list[tuple[int, slice]], Tensor]:
    """Each choice's row; each expert that has tokens, and its rows; those rows, yet to be filled."""
    counts, place = ids.new_empty(experts), torch.empty_like(ids)
    call("experts_count", ids, ids.numel(), experts, counts)
    ends = list(accumulate((rows_taken(each, x.dtype) for each in counts.tolist()), initial=0))
    groups = [(e, slice(a, b)) for e, (a, b) in enumerate(pairwise(ends)) if b > a]
    call("experts_place", ids, ids.numel(), ids.new_tensor(ends), place)
    return place, groups, _rows_like(x, ends[-1])


def _rows_like(x: Tensor, rows: int) -> Tensor:
    """Rows to write to; zero where some are only filled up, so that these add nothing to a gradient of weights."""
    return (x.new_zeros if x.dtype == torch.bfloat16 else x.new_empty)(rows, x.shape[1])
