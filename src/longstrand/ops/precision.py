"""The dtype in which recurrences, gates and normalisations are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for a float64 model, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(tensor: Tensor) -> Tensor:
    """The tensor in `wide_dtype`; itself when it already is."""
    return tensor.to(wide_dtype(tensor.dtype))
