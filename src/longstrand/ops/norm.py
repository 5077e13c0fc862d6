"""RMS normalisation, plain and gated."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.ops.native import SUFFIX, Op, call, name_of, refusal, refusal_of_any, require
from longstrand.ops.precision import wide


def _gated_refusal(x: Tensor, gate: Tensor, weight: Tensor) -> str | None:
    if x.dtype != torch.float32:
        return f"x is {name_of(x.dtype)}: the kernel takes float32"
    return refusal_of_any(x, gate)


NORM = Op("rms_norm", "eager", "rms_norm_", lambda x, weight: refusal(x))
GATED_NORM = Op("gated_rms_norm", "eager", "gated_norm_", _gated_refusal)


def rms_norm(x: Float[Tensor, "*N D"], weight: Float[Tensor, "D"], eps: float) -> Float[Tensor, "*N D"]:
    """RMSNorm over the last dim: w * x / sqrt(mean(x^2) + eps), the statistics in float32 or wider.

    Source: Zhang and Sennrich 2019, eq. 4; eps inside the root.
    """
    form = _NativeRmsNorm if NORM.in_kernel(x=x, weight=weight) else _RmsNorm
    return form.apply(x, weight, eps)


def gated_rms_norm(
    x: Float[Tensor, "*N D"], gate: Float[Tensor, "*N D"], weight: Float[Tensor, "D"], eps: float
) -> Float[Tensor, "*N D"]:
    """RMSNorm(x) * sigmoid(gate), all in float32 or wider; returned in the gate's dtype."""
    if GATED_NORM.in_kernel(x=x, gate=gate, weight=weight):
        return _NativeGatedNorm.apply(x, gate, weight, eps)
    return (_RmsNorm.apply(wide(x), wide(weight), eps) * wide(gate).sigmoid()).to(gate.dtype)


class _RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w, with one saved scalar per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        xw = wide(x)
        rstd = torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return weight * (xw * rstd).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = wide(x) * rstd
        dyw = wide(dy)
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dyw * normed).flatten(0, -2).sum(0).to(weight.dtype)
        dnormed = dyw * wide(weight)
        mean = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.addcmul_(normed, mean, value=-1).mul_(rstd)
        return dx.to(x.dtype), dweight, None


class _NativeRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, scale = x.contiguous(), wide(weight).contiguous()
        require(tuple(x.shape[-1:]), torch.float32, weight=scale)
        y = torch.empty_like(x)
        ctx.sizes, ctx.dtype = (x.numel() // x.shape[-1], x.shape[-1], float(eps)), weight.dtype
        call(f"rms_norm_forward_{SUFFIX[x.dtype]}", x, scale, *ctx.sizes, y)
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale = ctx.saved_tensors
        dx, d_scale = torch.empty_like(x), torch.zeros_like(scale) if ctx.needs_input_grad[1] else None
        call(f"rms_norm_backward_{SUFFIX[x.dtype]}", x, scale, dy.contiguous(), *ctx.sizes, dx, d_scale)
        return dx, None if d_scale is None else d_scale.to(ctx.dtype), None


class _NativeGatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, gate, scale = x.contiguous(), gate.contiguous(), wide(weight).contiguous()
        require(tuple(x.shape), gate.dtype, gate=gate)
        require(tuple(x.shape[-1:]), torch.float32, weight=scale)
        y = torch.empty_like(gate)
        ctx.sizes, ctx.dtype = (x.numel() // x.shape[-1], x.shape[-1], float(eps)), weight.dtype
        call(f"gated_norm_forward_{SUFFIX[gate.dtype]}", x, gate, scale, *ctx.sizes, y)
        ctx.save_for_backward(x, gate, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, gate, scale = ctx.saved_tensors
        dx, d_gate = torch.empty_like(x), torch.empty_like(gate)
        d_scale = torch.zeros_like(scale) if ctx.needs_input_grad[2] else None
        call(
            f"gated_norm_backward_{SUFFIX[gate.dtype]}",
            *(x, gate, scale, dy.contiguous(), *ctx.sizes, dx, d_gate, d_scale),
        )
        return dx, d_gate, None if d_scale is None else d_scale.to(ctx.dtype), None
