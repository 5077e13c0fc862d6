"""Depthwise causal convolution as one multiply-add per tap, with a carry and document starts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.native import SUFFIX, Op, call, refusal, require
from longstrand.ops.precision import wide

SHORT_CONV = Op("short_conv", "taps", "short_conv_", lambda x, weight, tail: refusal(x, tail))


def short_conv(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C J"],
    tail: Float[Tensor, "B J1 C"],
    offsets: Int[Tensor, "T"],
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B J1 C"]]:
    """silu of the depthwise causal convolution, and the tail for the next tile; see `short_conv_reference`.

    Computed in the weight's dtype (float32 or wider) and returned in that of x; a piece may be shorter than the
    window. Transients: 3 x B x T x C values.
    """
    if SHORT_CONV.in_kernel(x=x, weight=weight, tail=tail):
        return _NativeConv.apply(x, weight, tail, offsets)
    taps = weight.shape[1]
    joined = torch.cat([tail, x], dim=1)
    near = bool((offsets < taps - 1).any())
    inside: list[Tensor | None] = [None]
    for lag in range(1, taps):
        mask = (offsets >= lag).to(weight.dtype)[:, None] if near else None
        inside.append(mask)
    out = F.silu(_Taps.apply(joined.to(weight.dtype), weight, inside))
    # A copy: the tail is kept at a tile border, and a view would keep the whole tile alive.
    return out.to(x.dtype), joined[:, joined.shape[1] - (taps - 1) :].clone()


class _Taps(torch.autograd.Function):
    """sum_j w[J-1-j] x_{t-j}, taps that reach before the document left out; inputs `joined` hold the J-1 before."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, weight: Tensor, inside: list[Tensor | None]) -> Tensor:
        taps = weight.shape[1]
        length = joined.shape[1] - (taps - 1)
        out = joined[:, taps - 1 :] * weight[:, taps - 1]
        for lag in range(1, taps):
            shifted = joined[:, taps - 1 - lag : taps - 1 - lag + length]
            mask = inside[lag]
            if mask is not None:
                shifted = shifted * mask
            out.addcmul_(shifted, weight[:, taps - 1 - lag])
        ctx.save_for_backward(joined, weight)
        ctx.inside = inside
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        joined, weight = ctx.saved_tensors
        taps, length = weight.shape[1], dy.shape[1]
        d_joined = torch.zeros_like(joined)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for lag in range(taps):
            masked = dy if ctx.inside[lag] is None else dy * ctx.inside[lag]
            begin = taps - 1 - lag
            d_joined[:, begin : begin + length].addcmul_(masked, weight[:, begin])
            if d_weight is not None:
                d_weight[:, begin] = (masked * joined[:, begin : begin + length]).sum((0, 1))
        return d_joined, d_weight, None


class _NativeConv(torch.autograd.Function):
    """Convolution, silu and their backward, row by row; the new tail passes its gradient on to its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tail: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        even = x.stride(2) == 1 and (len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1))
        x, tail = x if even else x.clone(memory_format=torch.contiguous_format), tail.contiguous()
        taps, offsets = wide(weight).contiguous(), offsets.long().contiguous()
        batch, length, channels = x.shape
        require((batch, taps.shape[1] - 1, channels), x.dtype, tail=tail)
        require((channels,), torch.float32, weight=taps[:, 0])
        require((length,), torch.int64, offsets=offsets)
        out = torch.empty(x.shape, dtype=x.dtype)
        ctx.sizes, ctx.dtype = (*x.shape, taps.shape[1], x.stride(1)), weight.dtype
        call(f"short_conv_forward_{SUFFIX[x.dtype]}", x, tail, taps, offsets, *ctx.sizes, out)
        ctx.save_for_backward(x, tail, taps, offsets)
        return out, _last_rows(tail, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        x, tail, taps, offsets = ctx.saved_tensors
        dx, d_tail = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(tail)
        d_taps = torch.zeros_like(taps) if ctx.needs_input_grad[1] else None
        call(
            f"short_conv_backward_{SUFFIX[x.dtype]}",
            *(x, tail, taps, offsets, dy.contiguous(), *ctx.sizes, dx, d_tail, d_taps),
        )
        kept, length = tail.shape[1], x.shape[1]
        new = min(kept, length)
        dx[:, length - new :] += d_after[:, kept - new :]
        d_tail[:, length:] += d_after[:, : kept - new]
        return dx, None if d_taps is None else d_taps.to(ctx.dtype), d_tail, None


def _last_rows(tail: Tensor, x: Tensor) -> Tensor:
    kept, length = tail.shape[1], x.shape[1]
    if length >= kept:
        return x[:, length - kept :].clone()
    return torch.cat([tail[:, length:], x], dim=1)
