"""Weights stored as FP8 e4m3 in blocks, with a float32 factor per block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.hf_config_keys import FP8_BLOCK


def scale_name(tensor: str) -> str:
    """The tensor that holds the factors of an FP8 one."""
    return f"{tensor}_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One factor per block of 128 x 128, the last of a row or column possibly cut."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def dequantise(weight: Tensor, scale: Float[Tensor, "... R C"]) -> Tensor:
    """`weight[r, c] * scale[r // 128, c // 128]` in float32.

    Bytes: 4 per element for the result and a row of blocks of factors.
    """
    full = weight.to(torch.float32)
    columns = weight.shape[-1]
    for block in range(scale.shape[-2]):
        factors = scale[..., block, :].repeat_interleave(FP8_BLOCK, -1)[..., None, :columns]
        full[..., block * FP8_BLOCK : (block + 1) * FP8_BLOCK, :] *= factors
    return full
