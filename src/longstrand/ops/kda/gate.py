"""The log decay of KDA from its raw projection."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.ops.native import SUFFIX, Op, call, refusal, require
from longstrand.ops.precision import wide

LOG_DECAY = Op("log_decay", "eager", "log_decay_", lambda raw, a_log, bias: refusal(raw))


def log_decay(
    raw: Float[Tensor, "*N H K"], a_log: Float[Tensor, "H"], bias: Float[Tensor, "HK"], lower_bound: float
) -> Float[Tensor, "*N H K"]:
    """g = lower_bound x sigmoid(exp(a_log) x (raw + bias)): a scaled sigmoid, not a clamp; float32 or wider.

    Source: transformers `Glm5NextTextKimiDeltaAttention`.
    """
    if LOG_DECAY.in_kernel(raw=raw, a_log=a_log, bias=bias):
        return _NativeLogDecay.apply(raw, a_log, bias, lower_bound)
    shifted = wide(raw) + wide(bias).view_as(raw[(0,) * (raw.dim() - 2)])
    return lower_bound * torch.sigmoid(wide(a_log).exp()[:, None] * shifted)


class _NativeLogDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, a_log: Tensor, bias: Tensor, lower_bound: float) -> Tensor:
        raw, rate, shift = raw.contiguous(), wide(a_log).contiguous(), wide(bias).contiguous()
        require(tuple(raw.shape[-2:-1]), torch.float32, a_log=rate)
        require((raw.shape[-2] * raw.shape[-1],), torch.float32, bias=shift)
        g = torch.empty_like(raw, dtype=torch.float32)
        heads, key = raw.shape[-2:]
        ctx.sizes = (raw.numel() // (heads * key), heads, key, float(lower_bound))
        ctx.dtypes = (a_log.dtype, bias.dtype)
        call(f"log_decay_forward_{SUFFIX[raw.dtype]}", raw, rate, shift, *ctx.sizes, g)
        ctx.save_for_backward(raw, rate, shift)
        return g

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        raw, rate, shift = ctx.saved_tensors
        d_raw, d_rate, d_shift = torch.empty_like(raw), torch.zeros_like(rate), torch.zeros_like(shift)
        call(
            f"log_decay_backward_{SUFFIX[raw.dtype]}",
            *(raw, rate, shift, dg.contiguous(), *ctx.sizes, d_raw, d_rate, d_shift),
        )
        return d_raw, d_rate.to(ctx.dtypes[0]), d_shift.to(ctx.dtypes[1]), None
