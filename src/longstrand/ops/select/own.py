"""Selection of pools where each row is a document of its own: what decoding runs."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.select.reference import UNUSED

OWN_BLOCK = 8192


def select_own_pools(
    q: Float[Tensor, "B H D"],
    weights: Float[Tensor, "B H"],
    keys: Float[Tensor, "B P D"],
    num_visible: Int[Tensor, "B"],
    num_selected: int,
) -> Int[Tensor, "B I"]:
    """The best of each row's first `num_visible` keys: ties to the lowest id, ids ascending, then -1.

    `select_pools_reference` row by row is the definition, a NaN score counting as minus infinity; ids count from each
    row's own first key. While no row sees more than `num_selected`, nothing is scored.

    Args:
        q, weights: float32 or wider.

    Transients: B x P scores, and B x OWN_BLOCK x H of them before the heads are summed.
    """
    most = int(num_visible.max())
    if most <= num_selected:
        ids = torch.arange(num_selected, device=q.device).expand(len(q), -1)
        return ids.masked_fill(ids >= num_visible[:, None], UNUSED)
    scores = _scores(q * q.shape[-1] ** -0.5, weights, keys[:, :most])
    hidden = torch.arange(most, device=q.device) >= num_visible[:, None]
    scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores.masked_fill_(hidden, -torch.inf)  # behind the visible ones, which come first among equals
    cut = scores.topk(num_selected, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above = scores > cut
    equal = scores == cut
    wanted = num_selected - above.sum(dim=-1, keepdim=True)
    if bool((equal.sum(dim=-1, keepdim=True) > wanted).any()):
        equal &= equal.cumsum(dim=-1) <= wanted
    ids = (above | equal).nonzero()[:, 1].view(len(q), num_selected)
    return ids.masked_fill(ids >= num_visible[:, None], UNUSED)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    scores = q.new_empty(keys.shape[:2])  # B P
    for start in range(0, keys.shape[1], OWN_BLOCK):
        pools = slice(start, start + OWN_BLOCK)
        products = torch.bmm(q, keys[:, pools].to(q.dtype).mT).relu_()  # B H P
        scores[:, pools] = torch.bmm(weights.unsqueeze(1), products).squeeze(1)
    return scores
