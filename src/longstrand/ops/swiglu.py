"""The clamped gated activation of every feed-forward part."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def swiglu(gate: Float[Tensor, "*N F"], up: Float[Tensor, "*N F"], limit: float) -> Float[Tensor, "*N F"]:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): the clamps come first, the gate has no minimum.

    Source: transformers `Glm5NextTextMLP`.
    """
    return _SwiGlu.apply(gate, up, limit)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        gate = gate.clamp(max=limit)
        return torch.sigmoid(gate).mul_(gate).mul_(up.clamp(-limit, limit))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        limit = ctx.limit
        gate_c, up_c = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(gate_c)
        silu = gate_c * sigmoid
        d_up = (dy * silu).mul_(up == up_c)
        d_gate = sigmoid * (1 + gate_c - silu)
        return d_gate.mul_(dy).mul_(up_c).mul_(gate == gate_c), d_up, None
