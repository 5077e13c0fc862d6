"""The clamped gated activation of every feed-forward part."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.ops.native import SUFFIX, Op, call, refusal, require

SWIGLU = Op("swiglu", "eager", "swiglu_", lambda **inputs: refusal(*inputs.values()))


def swiglu(both: Float[Tensor, "*N F2"], limit: float) -> Float[Tensor, "*N F"]:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): the clamps come first, the gate has no minimum.

    Args:
        both: a row's gate part, then its up part.

    Source: transformers `Glm5NextTextMLP`.
    """
    return _SwiGlu.apply(both, limit)


def swiglu_forward(both: Float[Tensor, "*N F2"], limit: float) -> Float[Tensor, "*N F"]:
    """The value alone, without a graph."""
    if SWIGLU.in_kernel(both=both):
        both = both.contiguous()
        width = both.shape[-1] // 2
        out = both.new_empty(*both.shape[:-1], width)
        call(f"swiglu_forward_{SUFFIX[both.dtype]}", both, out.numel() // width, width, float(limit), out)
        return out
    gate, up = both.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(gate).mul_(gate).mul_(up.clamp(-limit, limit))


def swiglu_backward(
    both: Float[Tensor, "*N F2"], dy: Float[Tensor, "*N F"], limit: float
) -> Float[Tensor, "*N F2"]:
    """Gradient of both parts; exactly 0 where a clamp holds."""
    if SWIGLU.in_kernel(both=both, dy=dy):
        both, dy, width = both.contiguous(), dy.contiguous(), dy.shape[-1]
        require((*dy.shape[:-1], 2 * width), dy.dtype, both=both)
        d_both = torch.empty_like(both)
        sizes = (dy.numel() // width, width, float(limit))
        call(f"swiglu_backward_{SUFFIX[both.dtype]}", both, dy, *sizes, d_both)
        return d_both
    gate, up = both.chunk(2, dim=-1)
    gate_c, up_c = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid = torch.sigmoid(gate_c)
    silu = gate_c * sigmoid
    d_up = (dy * silu).mul_(up == up_c)
    d_gate = sigmoid * (1 + gate_c - silu)
    return torch.cat([d_gate.mul_(dy).mul_(up_c).mul_(gate == gate_c), d_up], dim=-1)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.limit = limit
        return swiglu_forward(both, limit)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (both,) = ctx.saved_tensors
        return swiglu_backward(both, dy, ctx.limit), None
