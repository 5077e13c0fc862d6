"""One direction of the mesh: the ranks along it, what they exchange, and how many bytes of what arrived here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

# Older torch has them under other names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Axis:
    """The ranks along one axis; alone, every exchange gives back what it was given.

    All ranks of an axis call the same exchanges in the same order.

    Args:
        name: "data", "context", "expert" or "world".
        group: its ranks; None for an axis of one.

    Attributes:
        size: number of ranks.
        rank: of this process along the axis.
        received: bytes that came from other ranks, by what they were.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None = None) -> None:
        self.name = name
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.group = group if self.size > 1 else None
        self.received: Counter[str] = Counter()

    def gather(self, x: Shaped[Tensor, "N *D"], what: str) -> Shaped[Tensor, "M *D"]:
        """The rows of all ranks in rank order, as many from each: M = size x N. Not a copy when alone."""
        if self.group is None:
            return x
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        _all_gather(out, x.contiguous(), group=self.group)
        self.received[what] += out.nbytes - x.nbytes
        return out

    def scatter_sum(self, x: Float[Tensor, "M *D"], what: str) -> Float[Tensor, "N *D"]:
        """This rank's part of the sum of x over ranks: M / size rows. Not a copy when alone."""
        if self.group is None:
            return x
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        _reduce_scatter(out, x.contiguous(), group=self.group)
        self.received[what] += (self.size - 1) * out.nbytes
        return out

    def exchange(
        self, x: Shaped[Tensor, "N *D"], send: Sequence[int], receive: Sequence[int], what: str
    ) -> Shaped[Tensor, "M *D"]:
        """Rows of others for rows of one's own.

        Args:
            x: the rows for rank 0, then those for rank 1, ...
            send: how many for each rank.
            receive: how many come from each; what they send to this one.

        Returns: the rows from rank 0, then those from rank 1, ...
        """
        if self.group is None:
            return x
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.group)
        self.received[what] += (sum(receive) - receive[self.rank]) * out[:1].nbytes if len(out) else 0
        return out

    def share(self, x: Shaped[Tensor, "*D"], source: int, what: str) -> Shaped[Tensor, "*D"]:
        """What one rank of the axis gives, on all of them; of what the others give shape and dtype count."""
        if self.group is None:
            return x
        out = x.contiguous()
        dist.broadcast(out, dist.get_global_rank(self.group, source), group=self.group)
        self.received[what] += out.nbytes if self.rank != source else 0
        return out

    def sum(self, x: Shaped[Tensor, "*D"], what: str = "sums") -> Shaped[Tensor, "*D"]:
        """Adds up x over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
            self.received[what] += x.nbytes
        return x

    def total(self, value: float) -> float:
        """A number summed over the ranks, in float64."""
        return float(self.sum(torch.tensor(value, dtype=torch.float64)))

    def largest(self, value: int) -> int:
        """The largest of a whole number over the ranks."""
        if self.group is None:
            return value
        held = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        return int(held)
