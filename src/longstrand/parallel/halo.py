"""The rows before each segment, fetched from whoever computes them, and their gradients on the way back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.parallel.axis import Axis
from longstrand.parallel.segments import Deal


class Halo:
    """The last `depth` rows of the same document before each segment of this rank.

    They may come from several earlier segments, where those are shorter than `depth`. Every rank gives its *tails*: the
    last `depth` rows of each of its segments (all rows of a shorter one), one segment after the other.

    Bytes: at most `depth` rows per segment of this rank, whatever the length of the pack.

    Args:
        starts: where documents start, and the end.

    Attributes:
        tails: rows of each own segment that others may need.
    """

    def __init__(self, axis: Axis, deal: Deal, starts: Sequence[int], depth: int) -> None:
        self.axis, self.depth = axis, depth
        spans = list(zip(deal.edges, deal.edges[1:], deal.owners, strict=False))
        begins, counts = [], [0] * axis.size  # row of each segment's tail among its owner's tails
        for start, stop, owner in spans:
            begins.append(counts[owner])
            counts[owner] += min(depth, stop - start)
        self.tails = [min(depth, stop - start) for start, stop, owner in spans if owner == axis.rank]
        send: list[list[int]] = [[] for _ in range(axis.size)]
        receive: list[list[int]] = [[] for _ in range(axis.size)]
        numbers = [0] * axis.size
        for start, _, owner in spans:
            document = starts[bisect_right(starts, start) - 1]
            for position in range(max(document, start - depth), start):
                segment = bisect_right(deal.edges, position) - 1
                from_start, from_stop, source = spans[segment]
                if source == axis.rank:
                    tail = min(depth, from_stop - from_start)
                    send[owner].append(begins[segment] + position - (from_stop - tail))
                if owner == axis.rank:
                    receive[source].append(numbers[owner] * depth + depth - (start - position))
            numbers[owner] += 1
        self._send, self._receive = [len(rows) for rows in send], [len(rows) for rows in receive]
        self._sent = torch.tensor([row for rows in send for row in rows], dtype=torch.int64)
        self._places = torch.tensor([row for rows in receive for row in rows], dtype=torch.int64)

    def fetch(self, tails: Float[Tensor, "N C"], what: str) -> Float[Tensor, "M J C"]:
        """The rows before each of this rank's M segments; zeros where the document has none."""
        sent = tails.index_select(0, self._sent.to(tails.device))
        came = self.axis.exchange(sent, self._send, self._receive, what)
        before = tails.new_zeros(len(self.tails) * self.depth, tails.shape[1])
        before[self._places.to(tails.device)] = came
        return before.view(len(self.tails), self.depth, tails.shape[1])

    def give_back(self, d_before: Float[Tensor, "M J C"], what: str) -> Float[Tensor, "N C"]:
        """Gradient of the tails, from that of the rows that were fetched."""
        sent = d_before.flatten(0, 1).index_select(0, self._places.to(d_before.device))
        came = self.axis.exchange(sent, self._receive, self._send, what)
        d_tails = d_before.new_zeros(sum(self.tails), d_before.shape[2])
        return d_tails.index_add_(0, self._sent.to(d_before.device), came)
