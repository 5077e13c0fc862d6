"""How far back the pools stand that queries select, next to what a choice without preference would have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longstrand.memory.tiles import Tile

BLOCK = 2**20
"""Selected pools looked at together: some 20 MB of transients."""


@dataclass
class LayerDistances:
    """Sums of one layer, or of several.

    Attributes:
        selected: int64[N], selected pools by bucket of their distance.
        uniform: float64[N], the same as expected of a uniform choice among the pools visible to each query.
        beyond, uniform_beyond: those at least `index_topk` tokens back.
        choosing: queries that see more pools than they take.
        queries: all of them.
    """

    selected: Tensor
    uniform: Tensor
    beyond: int = 0
    uniform_beyond: float = 0.0
    choosing: int = 0
    queries: int = 0

    def __add__(self, other: LayerDistances) -> LayerDistances:
        return LayerDistances(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def as_dict(self, edges: list[int]) -> dict[str, Any]:
        """Shares by bucket; None where no pool was selected."""
        total = int(self.selected.sum())

        def share(part: float) -> float | None:
            return part / total if total else None

        buckets = [
            {"start": start, "end": end, "selected": chosen, "share": share(chosen), "uniform": share(even)}
            for start, end, chosen, even in zip(
                edges, edges[1:], self.selected.tolist(), self.uniform.tolist(), strict=False
            )
        ]
        return {
            "queries": self.queries,
            "choosing": self.choosing,
            "selected": total,
            "buckets": buckets,
            "beyond_index_topk": {
                "selected": self.beyond,
                "share": share(self.beyond),
                "uniform": share(self.uniform_beyond),
            },
        }


class PoolDistances:
    """Counts tiles as they are chosen.

    The distance of a selected pool is the number of tokens from its last one to the query: 0 where the query completes
    it. Buckets [start, end) are 0 to kpool, which holds one pool of each query, and from there on double. A window of
    the latest `index_topk` tokens would never show the pools that stand at least as far back.

    Args:
        kpool, index_topk: tokens of a pool, and of all pools that a query selects.
        longest: tokens of the longest sequence.
    """

    def __init__(self, kpool: int, index_topk: int, longest: int) -> None:
        self.kpool, self.index_topk = kpool, index_topk
        self.edges = [0, kpool]
        while self.edges[-1] < longest:
            self.edges.append(2 * self.edges[-1])
        self.layers: dict[int, LayerDistances] = {}

    def add(self, layer: int, tile: Tile, pools: Tensor) -> None:
        """Counts one tile's selected pools [T, I], counted through the pack, -1 where none."""
        if layer not in self.layers:
            num = len(self.edges) - 1
            self.layers[layer] = LayerDistances(
                torch.zeros(num, dtype=torch.int64), torch.zeros(num, dtype=torch.float64)
            )
        rows = max(1, BLOCK // pools.shape[1])
        for start in range(0, len(pools), rows):
            part = slice(start, start + rows)
            self.layers[layer] += self._of_rows(
                tile.offsets[part], tile.num_visible[part], tile.first_pool[part], pools[part]
            )

    def over_all(self) -> LayerDistances:
        """All layers together."""
        first, *others = self.layers.values()
        for other in others:
            first = first + other
        return first

    def _of_rows(
        self, offsets: Tensor, num_visible: Tensor, first_pool: Tensor, pools: Tensor
    ) -> LayerDistances:
        used = pools >= 0
        last_tokens = (pools.long() - first_pool[:, None] + 1) * self.kpool - 1
        distance = (offsets[:, None] - last_tokens)[used]
        edges = torch.tensor(self.edges, device=pools.device)
        bucket = torch.bucketize(distance, edges, right=True) - 1
        taken = used.sum(1)
        # A visible pool stands (offset + 1) % kpool tokens back, or some whole pools more.
        nearest = (offsets + 1) % self.kpool
        each = taken.double() / num_visible.clamp(
            min=1
        )  # of a visible pool, how often a uniform choice takes it
        within = self._visible_within(edges, nearest, num_visible)
        topk = torch.tensor([self.index_topk], device=pools.device)
        near = self._visible_within(topk, nearest, num_visible)[:, 0]
        return LayerDistances(
            torch.bincount(bucket, minlength=len(edges) - 1).cpu(),
            (each[:, None] * within.diff(dim=1)).sum(0).cpu(),
            int((distance >= self.index_topk).sum()),
            float((each * (num_visible - near)).sum()),
            int((num_visible > taken).sum()),
            len(offsets),
        )

    def _visible_within(self, edges: Tensor, nearest: Tensor, num_visible: Tensor) -> Tensor:
        """[T, N]: visible pools of each query nearer than each edge."""
        pools = (edges[None, :] - nearest[:, None] + self.kpool - 1).clamp(min=0) // self.kpool
        return pools.minimum(num_visible[:, None])
