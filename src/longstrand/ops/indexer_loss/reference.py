"""KL of the attention's pool shares to the index scores, from full matrices: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def indexer_loss_reference(
    scores: Float[Tensor, "T P"], target: Float[Tensor, "T P"], visible: Bool[Tensor, "T P"]
) -> Float[Tensor, "T"]:
    """KL(target || softmax(scores over visible pools)) of each row in nats; 0 for a row that sees no pool.

    Source: DeepSeek-V3.2 (DSA), eq. 3-4, with pools in the place of tokens.
    """
    rows = []
    for t in range(len(scores)):
        if not bool(visible[t].any()):
            rows.append(scores.new_zeros(()))
            continue
        logprobs = torch.log_softmax(scores[t][visible[t]], dim=-1)
        wanted = target[t][visible[t]]
        rows.append((torch.xlogy(wanted, wanted) - wanted * logprobs).sum())
    return torch.stack(rows)
