"""The short convolution of one token in each row: what decoding runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def short_conv_step(
    x: Float[Tensor, "B C"], weight: Float[Tensor, "C J"], tail: Float[Tensor, "B J1 C"]
) -> Float[Tensor, "B C"]:
    """silu of the convolution at one token per row; `short_conv_reference` with T = 1 is the definition.

    The tail (zeros before a document's first token) is overwritten by that of the next token.
    """
    joined = torch.cat([tail, x.unsqueeze(1)], dim=1)
    tail.copy_(joined[:, 1:])
    return F.silu((joined.to(weight.dtype) * weight.T).sum(dim=1)).to(x.dtype)
