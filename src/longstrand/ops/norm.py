"""RMS normalisation, plain and gated."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.ops.precision import wide


def rms_norm(x: Float[Tensor, "*N D"], weight: Float[Tensor, "D"], eps: float) -> Float[Tensor, "*N D"]:
    """RMSNorm over the last dim: w * x / sqrt(mean(x^2) + eps), the statistics in float32 or wider.

    Source: Zhang and Sennrich 2019, eq. 4; eps inside the root.
    """
    return _RmsNorm.apply(x, weight, eps)


def gated_rms_norm(
    x: Float[Tensor, "*N D"], gate: Float[Tensor, "*N D"], weight: Float[Tensor, "D"], eps: float
) -> Float[Tensor, "*N D"]:
    """RMSNorm(x) * sigmoid(gate), all in float32 or wider; returned in the gate's dtype."""
    return (rms_norm(wide(x), wide(weight), eps) * wide(gate).sigmoid()).to(gate.dtype)


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
