"""A linear recurrence over the segments of all ranks: affine summaries exchanged over heads, scanned, and given back.

Each segment maps the state it enters to the one it leaves: S_out = A S_in + B. A rank scans its H / n heads over all
segments and returns what each segment enters; the states never pass from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.parallel.axis import Axis


def heads_over(num_ranks: int, num_heads: int) -> list[int]:
    """How many heads each rank scans."""
    cuts = [num_heads * rank // num_ranks for rank in range(num_ranks + 1)]
    return [stop - start for start, stop in pairwise(cuts)]


class AffineScan:
    """The scan of one layer and pass, there and back.

    Bytes to other ranks, of m segments with H heads: m H K (K + V) values there (16 MiB at 64 heads of 128 x 128 and
    two segments) and half of them back; as many in backward as come back, twice. None depends on the length. Kept from
    forward to backward: A of all M segments for this rank's heads, M H K K / n values.

    Args:
        owners: the rank of each segment of the pack.
    """

    def __init__(self, axis: Axis, owners: Sequence[int], num_heads: int) -> None:
        self.axis, self.owners = axis, owners
        self._heads = heads_over(axis.size, num_heads)
        self._segments = [
            [index for index, owner in enumerate(owners) if owner == rank] for rank in range(axis.size)
        ]
        self._maps: Tensor | None = None

    def forward(self, summaries: Float[Tensor, "M H K KV"]) -> Float[Tensor, "M H K V"]:
        """The state that each of this rank's segments enters, from [A | B] of each, float32 or wider."""
        key = summaries.shape[2]
        maps = self._to_heads(summaries, "KDA summaries")
        self._maps = maps[..., :key].contiguous()
        entering = torch.empty_like(maps[..., key:])
        state = torch.zeros_like(entering[0])
        for index in range(len(maps)):
            entering[index] = state
            state = self._maps[index] @ state + maps[index, ..., key:]
        return self._from_heads(entering, "KDA states")

    def backward(self, d_states: Float[Tensor, "M H K V"]) -> Float[Tensor, "M H K V"]:
        """Gradient of the state that each segment leaves, from what each one's own tokens send to the one it enters."""
        assert self._maps is not None
        own = self._to_heads(d_states, "KDA state gradients")
        leaving = torch.empty_like(own)
        grad = torch.zeros_like(own[0])
        for index in reversed(range(len(own))):
            leaving[index] = grad
            grad = self._maps[index].mT @ grad + own[index]
        return self._from_heads(leaving, "KDA state gradients")

    def _to_heads(self, x: Tensor, what: str) -> Tensor:
        """[m, H, ...] of this rank's segments -> [M, H / n, ...] of all, in the order of the pack."""
        rank, shape = self.axis.rank, x.shape[2:]
        rows = x.transpose(0, 1).flatten(0, 1)
        send = [heads * len(x) for heads in self._heads]
        receive = [self._heads[rank] * len(segments) for segments in self._segments]
        came = self.axis.exchange(rows, send, receive, what)
        out = x.new_empty(sum(map(len, self._segments)), self._heads[rank], *shape)
        for part, segments in zip(came.split(receive), self._segments, strict=True):
            out[segments] = part.view(self._heads[rank], len(segments), *shape).transpose(0, 1)
        return out

    def _from_heads(self, x: Tensor, what: str) -> Tensor:
        """The way back: [M, H / n, ...] -> [m, H, ...]."""
        rank, shape = self.axis.rank, x.shape[2:]
        rows = torch.cat([x[segments].transpose(0, 1).flatten(0, 1) for segments in self._segments])
        send = [self._heads[rank] * len(segments) for segments in self._segments]
        mine = len(self._segments[rank])
        came = self.axis.exchange(rows, send, [heads * mine for heads in self._heads], what)
        return came.view(sum(self._heads), mine, *shape).transpose(0, 1).contiguous()
