"""Selection of pools with plain Python sorting: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

UNUSED = -1


def pool_scores_reference(
    q: Float[Tensor, "T H D"], weights: Float[Tensor, "T H"], keys: Float[Tensor, "P D"]
) -> Float[Tensor, "T P"]:
    """score[t, p] = sum_h weights[t, h] relu(q[t, h] . keys[p] D^-0.5).

    Source: DeepSeek-V3.2 (DSA), eq. 1; transformers `Glm5NextTextIndexer`.
    """
    products = torch.einsum("thd,pd->thp", q, keys) * q.shape[-1] ** -0.5
    return torch.einsum("th,thp->tp", weights, products.relu())


def select_pools_reference(
    q: Float[Tensor, "T H D"],
    weights: Float[Tensor, "T H"],
    keys: Float[Tensor, "P D"],
    first_pool: Int[Tensor, "T"],
    num_visible: Int[Tensor, "T"],
    num_selected: int,
) -> Int[Tensor, "T I"]:
    """The `num_selected` visible pools with the highest scores, ties to the lowest id, ids ascending, then -1.

    A NaN score counts as minus infinity.
    """
    scores = pool_scores_reference(q, weights, keys)
    scores = scores.where(~scores.isnan(), -torch.inf)
    rows = []
    for t in range(len(q)):
        visible = range(int(first_pool[t]), int(first_pool[t] + num_visible[t]))
        best = sorted(visible, key=lambda pool: (-float(scores[t, pool]), pool))[:num_selected]
        rows.append(sorted(best) + [UNUSED] * (num_selected - len(best)))
    return torch.tensor(rows, dtype=torch.int32).view(len(q), num_selected)
