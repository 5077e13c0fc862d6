"""Depthwise causal convolution, token by token: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def short_conv_reference(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C J"],
    tail: Float[Tensor, "B J1 C"],
    offsets: Int[Tensor, "T"],
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B J1 C"]]:
    """y_t = silu(sum_j w[J-1-j] x_{t-j}) over the J taps that lie in the same document; and the last J-1 inputs.

    Args:
        tail: the J-1 inputs before the first, zeros at the start.
        offsets: tokens of the same document before each position.

    Source: Mamba (arXiv 2312.00752), figure 3; transformers `causal_conv1d_fn`.
    """
    taps = weight.shape[1]
    joined = torch.cat([tail, x], dim=1)
    rows = []
    for t in range(x.shape[1]):
        row = torch.zeros_like(x[:, 0])
        for lag in range(min(taps, int(offsets[t]) + 1)):
            row = row + weight[:, taps - 1 - lag] * joined[:, t + taps - 1 - lag]
        rows.append(torch.nn.functional.silu(row))
    return torch.stack(rows, dim=1), joined[:, joined.shape[1] - (taps - 1) :]
