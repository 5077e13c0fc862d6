"""Log-probabilities of targets from full logits: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def token_logprobs_reference(
    hidden: Float[Tensor, "T D"], weight: Float[Tensor, "W D"], targets: Int[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """log softmax(hidden weight^T)[target], 0 where the target is negative."""
    logprobs = torch.log_softmax(hidden @ weight.T, dim=-1)
    taken = logprobs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets < 0, torch.zeros_like(taken), taken)
