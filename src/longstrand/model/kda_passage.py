"""A KDA tile's graph up to the recurrence, and what ranks that share a pack exchange about their segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.memory.protocol import Choices, SideLosses
from longstrand.memory.shared_walk import HalvedGraph, Keeps, Read, read_tails
from longstrand.memory.tiles import PackLayout, SegmentTiles, Tile
from longstrand.model.index_keys import gradient_of
from longstrand.model.kda import KdaCarry, Rule
from longstrand.model.layer import Cut, Site
from longstrand.parallel.affine import AffineScan

if TYPE_CHECKING:
    from longstrand.model.kda_layer import KdaLayer


class KdaFront:
    """The first half of a tile's graph: hyper-connection, projections, convolution, recurrence.

    Kept per token in plain torch, beside the input and its gradient: what a `Cut` does, (3 H K + K) e and (9 H K + H +
    H (K^2 / 16 + 22.875 K + 51)) w bytes of e bytes per value and w per wide one. Measured as living tensors; the
    kernels of CPUs keep less (in the toy 9,572 of 23,912).

    Args:
        tail: the convolution's inputs before the tile.
        through: False where only the way back to the state is asked for, not that to the input.
    """

    def __init__(
        self,
        layer: KdaLayer,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        tail: Float[Tensor, "B J1 C"],
        *,
        through: bool = True,
    ) -> None:
        self._attention, self._tile = layer.self_attn, tile
        with torch.set_grad_enabled(through):
            self.cut = Cut(x, layer.enter_mixer)
            self._tail = tail.detach().requires_grad_()
            self._rule, self.tail_after = self._attention.rule(self.cut.leaves[0], tile, self._tail)

    @torch.enable_grad()
    def recur(self, state: Float[Tensor, "B H K V"]) -> None:
        """Goes on from the state that the tile enters."""
        self._state = state.detach().requires_grad_()
        self._out, self._state_after = self._attention.recur(self._rule, self._tile, self._state)
        self.out = self._out.detach().requires_grad_()

    @property
    def leaves(self) -> Sequence[Tensor]:
        return (self.cut.x, *self.cut.leaves, self.out)

    @property
    def rule(self) -> Rule:
        """The recurrence's inputs, without a graph."""
        q, k, v, g, beta = (part.detach() for part in self._rule)
        return q, k, v, g, beta

    @property
    def carry(self) -> KdaCarry:
        return KdaCarry(self.tail_after.detach(), self._state_after.detach())

    def d_state(self, d_after: Tensor) -> Tensor:
        """Gradient of the state before the tile, from those of its output and of the state after it."""
        outputs, grads = (self._out, self._state_after), (self.out.grad, d_after)
        (grad,) = torch.autograd.grad(outputs, self._state, grads, retain_graph=True)
        return grad

    def through(self, d_carry: KdaCarry | None) -> tuple[Tensor, KdaCarry]:
        assert self.out.grad is not None
        roots, grads = [self._out], [self.out.grad]
        if d_carry is not None:
            roots += [self.tail_after, self._state_after]
            grads += [d_carry.tail, d_carry.state]
        torch.autograd.backward(roots, grads)
        return self.cut.join(), KdaCarry(gradient_of(self._tail), gradient_of(self._state))


class KdaPassage:
    """The recurrence over segments that lie on several ranks.

    Forward: every segment's affine summary, scanned over heads (`AffineScan`), and the convolution's inputs before it.
    Backward: each segment's own part of its first state's gradient goes the same way, and gives the gradient of its
    last state; the gradient of the convolution's inputs before it goes to the tokens that they were made of.

    Kept from forward to backward, per layer: A of all M segments for this rank's H / n heads (M H K K / n values), the
    state (H K V) and the convolution's inputs ((J - 1) 3 H K) that each own segment enters, and J - 1 rows of R D of
    its end; the planner's "KDA's maps and states". The states' gradients, H K V twice, are of one layer at a time.
    """

    def __init__(
        self,
        layer: KdaLayer,
        read: Read,
        layout: PackLayout,
        tile_size: int,
        side: SideLosses,
        keeps: Keeps,
    ) -> None:
        assert layout.shard is not None
        self._layer, self._side, self.keeps = layer, side, keeps
        self._attention, shard = layer.self_attn, layout.shard
        self._halo = layout.halo(self._attention.taps - 1)
        self._fronts: dict[int, KdaFront] = {}
        self._values: dict[int, tuple[Site, Rule, Tensor]] = {}
        segments = layout.segment_tiles(tile_size)
        like = layer.input_layernorm.weight.new_empty(0, layer.shape.hc_mult, layer.shape.hidden_size)
        with torch.no_grad():
            self._tails = read_tails(read, segments, self._halo.tails, like)
            before = self._halo.fetch(self._conv_inputs(self._tails), "KDA convolution inputs")
        self._before = [rows.unsqueeze(0) for rows in before]
        self._rows_before = before
        summaries = [self._attention.start_summary()[:0]]
        for segment in segments:
            summary, tail = self._attention.start_summary(), self._before[segment.number]
            for tile in segment:
                summary, tail = self._summarise(read(tile), tile, summary, tail)
            summaries.append(summary)
        self._scan = AffineScan(shard.axis, shard.deal.owners, self._attention.heads)
        self._states = self._scan.forward(torch.cat(summaries))

    @cached_property
    def _d_own(self) -> Float[Tensor, "M H K V"]:
        """Gradient of the state that each segment enters, by its own tokens; made on the way back."""
        return torch.zeros_like(self._states)

    @cached_property
    def _d_tails(self) -> Float[Tensor, "M J1 C"]:
        return torch.zeros_like(self._rows_before)

    @property
    def num_tails(self) -> Sequence[int]:
        return self._halo.tails

    def entering(self, segment: int) -> KdaCarry:
        return KdaCarry(self._before[segment], self._states[segment].unsqueeze(0))

    def after(self, carry: KdaCarry | None) -> KdaCarry:
        """That of the rank with the last segment: H K V + (J - 1) 3 H K values to each of the others."""
        axis, owners = self._scan.axis, self._scan.owners
        carry = self._attention.start() if carry is None else carry
        parts = [axis.share(part, owners[-1], "KDA carry") for part in (carry.tail, carry.state)]
        return KdaCarry(*parts)

    def rest(self) -> None:
        """All is small, and needed again."""

    def warm_up(self, read: Read, segments: Sequence[SegmentTiles]) -> None:
        raise AssertionError("a layer without an indexer has nothing to warm up")

    def forward_tile(
        self, tile: Tile, x: Tensor, carry: KdaCarry, choices: Choices, *, choose: bool
    ) -> tuple[Tensor, KdaCarry]:
        if tile.index not in self._values:
            return self._layer.forward_tile(x, tile, carry, choices, self._side, choose=choose)
        site, rule, tail = self._values.pop(tile.index)
        out, state = self._attention.recur(rule, tile, carry.state)
        mixed = self._attention.project(site[0], out)
        y = self._layer.leave_mixer(x, site, mixed, choices, self._side, choose=choose)
        return y, KdaCarry(tail, state)

    def graph(
        self,
        tile: Tile,
        x: Tensor,
        kept: KdaCarry | Sequence[Tensor],
        choices: Choices,
        *,
        choose: bool,
    ) -> HalvedGraph:
        carry = kept if isinstance(kept, KdaCarry) else KdaCarry(*kept)
        front = self._fronts.pop(tile.index, None)
        if front is None:
            front = KdaFront(self._layer, x, tile, carry.tail, through=self.keeps == "graphs")
        front.recur(carry.state)
        with torch.enable_grad():
            y, ends = self._layer.rest(front, choices, self._side, choose=choose)
        return HalvedGraph(y, front.carry, front, lambda dy: ends.walk_back(y, dy))

    @torch.enable_grad()
    def front(self, tile: Tile, x: Tensor, kept: Sequence[Tensor]) -> KdaFront:
        carry = KdaCarry(*kept)
        front = KdaFront(self._layer, x, tile, carry.tail)
        front.recur(carry.state)
        return front

    def halved(self, segment: int, front: KdaFront) -> None:
        own = self._d_own[segment]
        own.copy_(front.d_state(own.unsqueeze(0))[0])

    def exchange_back(self) -> None:
        self._d_states = self._scan.backward(self._d_own)

    def leaving(self, segment: int) -> KdaCarry:
        """Nothing of the tail: its gradient comes by `tails_back`."""
        tail = torch.zeros_like(self._before[segment])
        return KdaCarry(tail, self._d_states[segment].unsqueeze(0))

    def entered(self, segment: int, d_carry: KdaCarry) -> None:
        self._d_tails[segment] = d_carry.tail[0]

    def tails_back(self) -> Float[Tensor, "N R D"]:
        d_inputs = self._halo.give_back(self._d_tails, "KDA convolution input gradients")
        if not len(self._tails):  # a rank without tokens
            return self._tails
        with torch.enable_grad():
            cut = Cut(self._tails, self._layer.enter_mixer)
            inputs = self._attention.conv_inputs(cut.leaves[0])
        torch.autograd.backward(inputs, d_inputs)
        return cut.join()

    def _conv_inputs(self, x: Tensor) -> Tensor:
        return self._attention.conv_inputs(self._layer.enter_mixer(x)[0])

    def _summarise(self, x: Tensor, tile: Tile, summary: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """[A | B] and the convolution's tail after a tile."""
        if self.keeps == "graphs":
            with torch.enable_grad():
                front = self._fronts[tile.index] = KdaFront(self._layer, x, tile, tail)
            rule, tail = front.rule, front.tail_after.detach()
        with torch.no_grad():
            if self.keeps != "graphs":
                site = self._layer.enter_mixer(x)
                rule, tail = self._attention.rule(site[0], tile, tail)
                if self.keeps == "values":
                    self._values[tile.index] = (site, rule, tail)
            return self._attention.summarise(rule, tile, summary), tail
