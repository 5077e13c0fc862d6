"""The weights of a layer, or of what lies around the layers, where each rank holds some rows of each.

FSDP2 (`fully_shard`) cuts and gathers them. Gradients are added up here and not by its hooks: those sit on one forward
and one backward of a module, while a layer runs tile by tile, and they round a sum to the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longstrand.ops.precision import wide_dtype
from longstrand.parallel import Axis, like_sharded, local_part


@dataclass(frozen=True)
class ShardedWeight:
    """One sharded parameter.

    Attributes:
        owner, name: the module and attribute where the whole weight stands while it is gathered.
        part: the rows of this rank, which the optimizer moves.
        axis: the ranks that hold the other rows.
    """

    owner: nn.Module
    name: str
    part: nn.Parameter
    axis: Axis

    @property
    def whole(self) -> nn.Parameter:
        """The gathered weight, on which tiles add up their gradients."""
        return getattr(self.owner, self.name)


class Shards:
    """What is gathered, used and freed together.

    Bytes while gathered: all weights once more; in `reduce` their gradients twice (float32 or wider).

    Args:
        modules: FSDP's, one for each mesh.
        weights: those that are sharded.
        replicated: those that every rank holds whole, since their dtype is not that of the others.
        world: all ranks, over which gradients of the replicated ones are summed.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        weights: Sequence[ShardedWeight],
        replicated: Sequence[nn.Parameter],
        world: Axis,
    ) -> None:
        self.modules, self.weights, self.replicated, self.world = modules, weights, replicated, world
        self._before: list[Tensor | None] | None = None  # gradients of earlier packs, while gathered

    def gather(self) -> None:
        """Puts the whole weights in place; the same call on all ranks."""
        if self._before is not None:
            return
        for module in self.modules:
            module.unshard()
        for weight in self.weights:
            # Torch keeps the gathered parameter and so this; the first time it would add up in its own dtype.
            weight.whole.grad_dtype = wide_dtype(weight.part.dtype)
        self._before = [parameter.grad for parameter in self.replicated]
        for parameter in self.replicated:
            parameter.grad = None

    def free(self) -> None:
        """Frees the whole weights; gradients that were not reduced go with them."""
        if self._before is None:
            return
        for weight in self.weights:
            weight.whole.grad = None
        for module in self.modules:
            module.reshard()
        for parameter, before in zip(self.replicated, self._before, strict=True):
            parameter.grad = before
        self._before = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Adds the gradients of this pass, summed over ranks, to those of earlier passes: one exchange per axis.

        A trained weight that nothing reached counts as zeros, so that all ranks exchange the same tensors.
        """
        assert self._before is not None
        for axis in dict.fromkeys(weight.axis for weight in self.weights):
            trained = [weight for weight in self.weights if weight.axis is axis and weight.part.requires_grad]
            if trained:
                _scatter(trained, axis)
        if numbers := [number for number, weight in enumerate(self.replicated) if weight.requires_grad]:
            self._sum_replicated(numbers)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Weights are whole inside; inside another such context nothing happens."""
        if self._before is not None:
            yield
            return
        self.gather()
        try:
            yield
        finally:
            self.free()

    def around(self, run: Callable[[], Tensor]) -> Tensor:
        """What `run` returns, computed with whole weights; so is its way back, after which gradients are reduced."""
        if torch.is_grad_enabled():
            return _Around.apply(torch.zeros((), requires_grad=True), self, run)
        with self.gathered():
            return run()

    def _sum_replicated(self, numbers: Sequence[int]) -> None:
        assert self._before is not None
        mine = [_gradient(self.replicated[number]) for number in numbers]
        flat = self.world.sum(torch.cat([gradient.flatten() for gradient in mine]), "gradients")
        for number, values in zip(numbers, flat.split([gradient.numel() for gradient in mine]), strict=True):
            before, total = self._before[number], values.view(self.replicated[number].shape)
            self._before[number] = total if before is None else before + total


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shards: Shards, run: Callable[[], Tensor]) -> Tensor:
        with shards.gathered(), torch.enable_grad():
            ctx.shards, ctx.out = shards, run()
        out: Tensor = ctx.out.detach()
        if not ctx.out.requires_grad:
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[None, None, None]:
        out, ctx.out = ctx.out, None
        if out is None:
            raise RuntimeError("a pass goes back once and frees what it kept; call token_logprobs again")
        with ctx.shards.gathered():
            torch.autograd.backward(out, d_out)
            ctx.shards.reduce()
        return None, None, None


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype), requires_grad=False)
    return parameter.grad


def _scatter(weights: Sequence[ShardedWeight], axis: Axis) -> None:
    """One exchange for all of them: a row of `rows` for each rank, with its part of every gradient."""
    sizes = [_largest_part(weight, axis.size) for weight in weights]
    dtype = wide_dtype(weights[0].part.dtype)
    rows = torch.zeros(axis.size, sum(sizes), dtype=dtype, device=weights[0].part.device)
    for weight, columns in zip(weights, rows.split(sizes, dim=1), strict=True):
        if weight.whole.grad is not None:
            _fill(columns, weight.whole.grad.flatten())
            weight.whole.grad = None
    (mine,) = axis.scatter_sum(rows, "gradients")
    for weight, values in zip(weights, mine.split(sizes), strict=True):
        part = local_part(weight.part)
        _add(weight.part, values[: part.numel()].view(part.shape))


def _largest_part(weight: ShardedWeight, num_ranks: int) -> int:
    """Values in the part of rank 0; the last ranks have fewer or none, as torch cuts."""
    rows = weight.whole.shape[0]
    return -(-rows // num_ranks) * (weight.whole.numel() // rows)


def _fill(columns: Tensor, values: Tensor) -> None:
    """Cuts values into rows of the columns' width; what is beyond them stays zero."""
    width = columns.shape[1]
    full, rest = divmod(len(values), width)
    columns[:full] = values[: full * width].view(full, width)
    if rest:
        columns[full, :rest] = values[full * width :]


def _add(parameter: nn.Parameter, values: Tensor) -> None:
    if parameter.grad is not None:
        local_part(parameter.grad).add_(values)
        return
    parameter.grad_dtype = values.dtype
    parameter.grad = like_sharded(values, parameter)
