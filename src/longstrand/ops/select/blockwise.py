"""Selection of pools block by block with a running exact top-k: no [T, P] matrix is formed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longstrand.ops.native import SUFFIX, Op, call, refusal_of_any, require
from longstrand.ops.precision import wide
from longstrand.ops.select.reference import UNUSED

ROW_BLOCK = 256
POOL_BLOCK = 4096
KERNEL_ROWS, KERNEL_POOLS = 4, 32  # ROWS and STEP of kernel.cpp: scored at once


def _refusal(q: Tensor, weights: Tensor, keys: Tensor, num_selected: int) -> str | None:
    """The keys may be bfloat16 where the queries are float32."""
    return refusal_of_any(q, weights, keys)


SELECT = Op("select_pools", "blockwise", "select_pools_", _refusal)


def unseen(
    ids: Int[Tensor, "P"], first_pool: Int[Tensor, "T"], num_visible: Int[Tensor, "T"]
) -> Bool[Tensor, "T P"]:
    """True where row t does not see pool p: it sees [first_pool[t], first_pool[t] + num_visible[t]) only."""
    return (ids < first_pool[:, None]) | (ids >= (first_pool + num_visible)[:, None])


def pool_scores(
    q: Float[Tensor, "T H D"], weights: Float[Tensor, "T H"], keys: Float[Tensor, "P D"]
) -> Float[Tensor, "T P"]:
    """Scores of one block; see `pool_scores_reference`. Transients: 2 x T x P values, one head at a time."""
    q = q * q.shape[-1] ** -0.5
    scores = q.new_zeros(len(q), len(keys))
    for head in range(q.shape[1]):
        scores.addcmul_((q[:, head] @ keys.T).relu_(), weights[:, head, None])
    return scores


def select_pools(
    q: Float[Tensor, "T H D"],
    weights: Float[Tensor, "T H"],
    keys: Float[Tensor, "P D"],
    first_pool: Int[Tensor, "T"],
    num_visible: Int[Tensor, "T"],
    num_selected: int,
) -> Int[Tensor, "T I"]:
    """The visible pools with the highest scores, ties to the lowest id, ids ascending, -1 where there are fewer.

    Equal to `select_pools_reference` for every block size, a NaN score counting as minus infinity. Pools that no row of
    a block can see are skipped; while no row sees more than `num_selected`, nothing is scored.

    Args:
        q, weights: float32 or wider.
        first_pool, num_visible: row t sees the pools [first_pool[t], first_pool[t] + num_visible[t]).

    Transients: ROW_BLOCK x POOL_BLOCK x 3 values; the kernel's are a float32 copy of q, and per thread 1024 keys and
    8 x num_selected values for each of up to 128 rows.

    Raises:
        ValueError: from the kernel, where a row sees pools that there are no keys for.
    """
    chosen = torch.empty(len(q), num_selected, dtype=torch.int32, device=q.device)
    if SELECT.in_kernel(q=q, weights=weights, keys=keys, num_selected=num_selected):
        _select_in_kernel(q, weights, keys, first_pool, num_visible, chosen)
        return chosen
    for start in range(0, len(q), ROW_BLOCK):
        rows = slice(start, start + ROW_BLOCK)
        chosen[rows] = _select_rows(
            q[rows], weights[rows], keys, first_pool[rows], num_visible[rows], num_selected
        )
    return chosen


def _select_in_kernel(
    q: Tensor, weights: Tensor, keys: Tensor, first_pool: Tensor, num_visible: Tensor, chosen: Tensor
) -> None:
    """Scores never leave the registers, and each thread packs a block of keys at a time; see kernel.cpp."""
    first_pool, num_visible = first_pool.long().contiguous(), num_visible.long().contiguous()
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    require(tuple(q.shape[:2]), weights.dtype, weights=weights)
    require(tuple(q.shape[:1]), torch.int64, first_pool=first_pool, num_visible=num_visible)
    require((len(keys), q.shape[2]), keys.dtype, keys=keys)
    if int((first_pool + num_visible).max()) > len(keys) or int(first_pool.min()) < 0:
        raise ValueError(f"a row sees pools beyond the {len(keys)} that there are")
    spare = (0, 0, 0, 3)  # the inner loop takes four rows
    scaled = F.pad(wide(q) * q.shape[-1] ** -0.5, (0, 0, *spare))
    call(
        f"select_pools_{SUFFIX[keys.dtype]}",
        *(scaled, F.pad(wide(weights), spare), keys, first_pool, num_visible),
        *(*q.shape, chosen.shape[1], len(keys), keys.stride(0), chosen),
    )


def _select_rows(
    q: Tensor, weights: Tensor, keys: Tensor, first_pool: Tensor, num_visible: Tensor, num_selected: int
) -> Tensor:
    if int(num_visible.max()) <= num_selected:
        slots = torch.arange(num_selected, device=q.device)
        ids = first_pool[:, None] + slots
        return ids.masked_fill(slots >= num_visible[:, None], UNUSED).int()
    begin, end = int(first_pool.min()), int((first_pool + num_visible).max())
    best_scores = q.new_full((len(q), num_selected), -torch.inf)
    best_ids = torch.full((len(q), num_selected), UNUSED, device=q.device)
    for block in range(begin, end, POOL_BLOCK):
        ids = torch.arange(block, min(block + POOL_BLOCK, end), device=q.device)
        scores = pool_scores(q, weights, keys[block : block + len(ids)].to(q.dtype))
        scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        scores.masked_fill_(unseen(ids, first_pool, num_visible), -torch.inf)
        scores = torch.cat([best_scores, scores], dim=-1)  # ids stay ascending from left to right
        all_ids = torch.cat([best_ids, ids.expand(len(q), -1)], dim=-1)
        position = _top_positions(scores, num_selected)
        best_scores, best_ids = scores.gather(-1, position), all_ids.gather(-1, position)
        order = torch.where(best_scores == -torch.inf, end, best_ids).argsort(dim=-1)
        best_scores, best_ids = best_scores.gather(-1, order), best_ids.gather(-1, order)
    best_ids.masked_fill_(best_scores == -torch.inf, UNUSED)
    return _fill(best_ids, first_pool, num_visible.clamp(max=num_selected)).int()


def _fill(ids: Tensor, first_pool: Tensor, wanted: Tensor) -> Tensor:
    """Rows with fewer pools than wanted [T] above minus infinity take the lowest others that they see."""
    rows = ((ids != UNUSED).sum(-1) < wanted).nonzero()[:, 0]
    if len(rows):
        some, first, count = ids[rows], first_pool[rows, None], ids.shape[1]
        lowest = first + torch.arange(count, device=ids.device)
        unused = some == UNUSED
        offsets = torch.where(unused, count, some - first).clamp(max=count)
        free = torch.ones(len(rows), count + 1, dtype=torch.bool, device=ids.device)
        free = free.scatter_(1, offsets, False)[:, :count]
        free &= free.cumsum(-1) <= wanted[rows, None] - (~unused).sum(-1, keepdim=True)
        last = torch.iinfo(ids.dtype).max  # sorts unused slots to the end
        joined = torch.cat([some.masked_fill(unused, last), lowest.masked_fill(~free, last)], dim=-1)
        joined = joined.sort(dim=-1).values[:, :count]
        ids[rows] = joined.masked_fill(joined == last, UNUSED)
    return ids


def _top_positions(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest of each row, ties to the leftmost: `topk` alone leaves ties open."""
    values, position = scores.topk(count, dim=-1, sorted=False)
    cut = values.amin(dim=-1, keepdim=True)
    left_out = (scores == cut).sum(-1) > (values == cut).sum(-1)
    rows = (left_out & (cut[:, 0] > -torch.inf)).nonzero()[:, 0]
    if len(rows):
        tied, cut = scores[rows], cut[rows]
        above, equal = tied > cut, tied == cut
        wanted = count - above.sum(-1, keepdim=True)
        taken = above | (equal & (equal.cumsum(-1) <= wanted))
        position[rows] = taken.nonzero()[:, 1].view(len(rows), count)
    return position
