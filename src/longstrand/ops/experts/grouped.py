"""Routed experts: tokens sorted by expert, one matrix product per expert that has any."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.swiglu import swiglu


def experts(
    x: Float[Tensor, "T D"],
    ids: Int[Tensor, "T A"],
    weights: Float[Tensor, "T A"],
    gate_up: Float[Tensor, "E F2 D"],
    down: Float[Tensor, "E D F"],
    limit: float,
) -> Float[Tensor, "T D"]:
    """Weighted sum of each token's experts; see `experts_reference`.

    An expert without tokens is skipped and its gradient is exactly zero. Transients: A x T x (2 D + 3 F) values.
    """
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten().long(), minlength=len(gate_up)).tolist()
    grouped = x.index_select(0, order // ids.shape[1]).split(counts)
    outputs = []
    for expert, rows in enumerate(grouped):
        if len(rows):
            gate, up = (rows @ gate_up[expert].T).chunk(2, dim=-1)
            outputs.append(swiglu(gate, up, limit) @ down[expert].T)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    per_choice = torch.cat(outputs).index_select(0, back).view(*ids.shape, -1)  # T A D
    return torch.bmm(weights.to(x.dtype).unsqueeze(1), per_choice).squeeze(1)
