"""Routed experts, token by token: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def experts_reference(
    x: Float[Tensor, "T D"],
    ids: Int[Tensor, "T A"],
    weights: Float[Tensor, "T A"],
    gate_up: Float[Tensor, "E F2 D"],
    down: Float[Tensor, "E D F"],
    limit: float,
) -> Float[Tensor, "T D"]:
    """y_t = sum_a weights[t, a] down_e(silu(min(gate_e x, limit)) * clamp(up_e x, -limit, limit)), e = ids[t, a].

    Source: transformers `Glm5NextTextExperts`.
    """
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        for a in range(ids.shape[1]):
            gate, up = (gate_up[ids[t, a]] @ x[t]).chunk(2)
            hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            row = row + weights[t, a] * (down[ids[t, a]] @ hidden)
        rows.append(row)
    return torch.stack(rows)
