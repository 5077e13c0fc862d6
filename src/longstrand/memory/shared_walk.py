"""A pass of a pack that several ranks share: what a layer hands from segment to segment goes from rank to rank.

A rank computes its own segments and nothing else. What enters a segment depends on earlier ones, so a layer takes two
passes over its tiles each way: forward, one for what its ranks exchange (`meet`) and one for the output; backward, one
from the output to the middle of each tile's graph and, once the ranks have exchanged, one from there to the input.

Kept between the two stages of a layer's way back, beside what one rank keeps: the gradients in the middle, D + R + R^2
values per token (and the output of the recurrence, H V, in a KDA layer), of one layer at a time; and for the last layer
a stream of R x D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from longstrand.memory.borders import Borders
from longstrand.memory.protocol import Choices, ScanLayer, SideLosses
from longstrand.memory.streams import Stream
from longstrand.memory.tiles import PackLayout, SegmentTiles, Tile
from longstrand.memory.walk import Walk, rows_of

Read = Callable[[Tile], Tensor]

Keeps = Literal["nothing", "values", "graphs"]
"""What a passage keeps of its first pass over the tiles for the second one."""


@runtime_checkable
class Front(Protocol):
    """The first half of a tile's graph: from its input to the leaves at which the second half begins."""

    @property
    def leaves(self) -> Sequence[Tensor]:
        """Where the halves meet, the input first; gradients collect in their `.grad`."""

    def through(self, d_carry: Any) -> tuple[Tensor, Any]:
        """From the leaves' gradients and that of the carry handed on to those of the input and the carry before."""


@dataclass
class HalvedGraph:
    """A tile's graph that is walked back in two stages.

    Attributes:
        halve: from the gradient of y to those of the front's leaves.
    """

    y: Tensor
    carry: Any
    front: Front
    halve: Callable[[Tensor], None]


@runtime_checkable
class Passage(Protocol):
    """What a layer exchanges with other ranks in one pass of a pack; its fronts, where it keeps them."""

    num_tails: Sequence[int]
    """Last rows of each segment that others depend on."""

    def entering(self, segment: int) -> Any:
        """The carry that a segment enters, in the second pass forward."""

    def after(self, carry: Any) -> Any:
        """The carry after the pack's last token on every rank, as one process has it, in place of the second pass.

        Args:
            carry: what this rank's last segment has left; None where it has none.
        """

    def forward_tile(
        self, tile: Tile, x: Tensor, carry: Any, choices: Choices, *, choose: bool
    ) -> tuple[Tensor, Any]:
        """A tile's output and next carry in the second pass, without a graph."""

    def graph(self, tile: Tile, x: Tensor, kept: Any, choices: Choices, *, choose: bool) -> HalvedGraph:
        """A tile's graph, on the front that was kept of it if any; `kept` is the carry, or what was kept of it."""

    def front(self, tile: Tile, x: Tensor, kept: Sequence[Tensor]) -> Front:
        """The first half alone."""

    def halved(self, segment: int, front: Front) -> None:
        """Called after each tile's second half, last tile first."""

    def exchange_back(self) -> None:
        """Between the stages: what other ranks' tokens send back to this one's."""

    def leaving(self, segment: int) -> Any:
        """The gradient of the carry that a segment leaves."""

    def entered(self, segment: int, d_carry: Any) -> None:
        """Takes the gradient of the carry that a segment entered."""

    def tails_back(self) -> Tensor:
        """Gradient of the input's last rows of each segment, from what later segments sent back."""

    def rest(self) -> None:
        """Forward is done: frees what the way back gathers anew."""

    def warm_up(self, read: Read, segments: Sequence[SegmentTiles]) -> None:
        """Adds the indexer's loss and its gradients, from all tiles and ranks; for a layer that learns to select."""


@runtime_checkable
class SharedLayer(ScanLayer, Protocol):
    """A layer whose packs several ranks may share."""

    def meet(self, read: Read, layout: PackLayout, tile_size: int, side: SideLosses, keeps: Keeps) -> Passage:
        """The first pass over the tiles, and what the ranks exchange after it."""

    def meet_again(
        self,
        passage: Passage,
        read: Read,
        layout: PackLayout,
        tile_size: int,
        side: SideLosses,
        keeps: Keeps,
    ) -> Passage:
        """What the way back needs of it, exchanged anew where it was not kept."""


@dataclass
class SharedWalk(Walk):
    """The pass of one rank; see `Walk`."""

    passages: dict[int, Passage] = field(default_factory=dict)
    halves: dict[int, dict[int, HalvedGraph]] = field(default_factory=dict)  # without recompute

    def _forward_layer(self, index: int, source: Stream | None, put: Callable[[Tile, Tensor], None]) -> None:
        layer, kept, size = self._shared(index), index >= self.first, self.levers.tile
        choices = self._new_choices(index)
        keeps_graphs = kept and not self.levers.recompute
        layer.gather_weights()
        keeps: Keeps = "graphs" if keeps_graphs else "values" if self.levers.keep_fronts else "nothing"
        passage = layer.meet(partial(self._read, source), self.layout, size, self.side, keeps)
        if kept:
            self.passages[index] = passage
            self.borders[index] = Borders(self.layout.num_tiles(size))
        graphs, carry = self.halves.setdefault(index, {}), None
        for segment in self.layout.segment_tiles(size):
            carry = passage.entering(segment.number)
            for tile in segment:
                rows, x = rows_of(choices, tile), self._read(source, tile)
                if keeps_graphs:
                    graph = passage.graph(tile, x, carry, rows, choose=True)
                    graphs[tile.index] = graph
                    y, carry = graph.y.detach(), graph.carry
                else:
                    if kept:
                        self.borders[index].push(layer.keep(carry))
                    y, carry = passage.forward_tile(tile, x, carry, rows, choose=True)
                self._pass_on(index, tile, y, rows, put)
                del y  # else it lives through the next tile
        if kept and not keeps_graphs:
            passage.rest()
        self._idle_forward(index, kept=kept)
        if self.carries is not None:
            self.carries.append(passage.after(carry))
        layer.free_weights()

    def _backward_layer(
        self, index: int, above: Callable[[Tile], Tensor], dy: Stream | None
    ) -> Stream | None:
        stream = self.inputs.pop(index, None)
        layer = self._shared(index)
        layer.gather_weights()
        back = _LayerBack(self, index, stream, dy)
        self._idle_back(index)  # here, as forward: between the exchanges of the layer's mixer
        back.to_the_middle(above)
        back.passage.exchange_back()
        back.to_the_input(lambda tile, dx: self._hand_down(index, stream, tile, dx))
        d_tails = back.passage.tails_back()
        for segment, rows in zip(back.segments, d_tails.split(list(back.passage.num_tails)), strict=True):
            for tile, part in _last_rows(segment, rows):
                self._add(index, stream, tile, part)
        layer.reduce_gradients()
        layer.free_weights()
        return stream

    def _add(self, index: int, stream: Stream | None, tile: Tile, rows: Tensor) -> None:
        """Adds to the gradient of a tile's last rows, wherever `_hand_down` put it."""
        if self.side.watch is not None:
            self.side.watch.gradient(index, tile.positions.stop - len(rows), rows)
        if index > self.first and stream is not None:
            dx = stream.read(tile).clone()
            dx[len(tile) - len(rows) :] += rows
            stream.write(tile, dx)
        elif self.d_embedding is not None:
            positions = slice(tile.positions.stop - len(rows), tile.positions.stop)
            total = rows.to(self.d_embedding.dtype).sum(dim=1)
            self.d_embedding.index_add_(0, self.tokens[positions], total)

    @torch.no_grad()
    def _rebuild_input(self, index: int) -> None:
        if index == 0 or index in self.inputs:
            return
        start = index - (index - self.first) % self.levers.keep_every
        stream = self.inputs.get(start)
        for below in range(start, index):
            layer, choices, above = self._shared(below), self.choices[below], self._new_stream()
            read = partial(self._read, stream)
            layer.gather_weights()
            keeps: Keeps = "values" if self.levers.keep_fronts else "nothing"
            passage = layer.meet(read, self.layout, self.levers.tile, self.side, keeps)
            for segment in self.layout.segment_tiles(self.levers.tile):
                carry = passage.entering(segment.number)
                for tile in segment:
                    rows = rows_of(choices, tile)
                    y, carry = passage.forward_tile(tile, read(tile), carry, rows, choose=False)
                    above.write(tile, y)
                    del y
            self._idle_forward(below, choose=False)
            layer.free_weights()
            self.inputs[below + 1] = stream = above

    def _warm_up(self) -> None:
        for index in range(len(self.layers) - 1, self.first - 1, -1):
            layer = self._shared(index)
            if layer.learns_to_select():
                self._rebuild_input(index)
                read = partial(self._read, self.inputs.get(index))
                layer.gather_weights()
                passage = layer.meet(read, self.layout, self.levers.tile, self.side, "nothing")
                passage.warm_up(read, self.layout.segment_tiles(self.levers.tile))
                layer.reduce_gradients()
                layer.free_weights()
            if (done := self.inputs.pop(index, None)) is not None:
                done.free()
            del self.choices[index], self.borders[index], self.passages[index]

    def _shared(self, index: int) -> SharedLayer:
        return cast(SharedLayer, self.layers[index])


class _LayerBack:
    """One layer's way back in its two stages."""

    def __init__(self, walk: SharedWalk, index: int, stream: Stream | None, dy: Stream | None) -> None:
        self.walk, self.stream = walk, stream
        self.recompute, size = walk.levers.recompute, walk.levers.tile
        self.keeps: Keeps = "graphs" if walk.levers.keep_fronts or not self.recompute else "nothing"
        self.segments: list[SegmentTiles] = walk.layout.segment_tiles(size)
        self.choices, self.borders = walk.choices.pop(index), walk.borders.pop(index)
        self.graphs = walk.halves.pop(index)
        self.passage: Passage = walk.passages.pop(index)
        if self.recompute:
            layer = walk._shared(index)
            self.passage = layer.meet_again(
                self.passage, self._read, walk.layout, size, walk.side, self.keeps
            )
        self.own_stream = walk._new_stream() if self.keeps == "nothing" and dy is None else None
        self.middle = dy if dy is not None else self.own_stream
        self.parts: dict[int, list[Tensor]] = {}
        self.fronts: dict[int, Front] = {}

    def to_the_middle(self, above: Callable[[Tile], Tensor]) -> None:
        """Every tile from its output to the leaves of its front."""
        for segment in reversed(self.segments):
            for tile in segment.back():
                graph = self._graph(tile) if self.recompute else self.graphs.pop(tile.index)
                graph.halve(above(tile))
                self.passage.halved(segment.number, graph.front)
                if self.keeps == "graphs":
                    self.fronts[tile.index] = graph.front
                else:
                    assert self.middle is not None
                    dx, *self.parts[tile.index] = [_taken(leaf) for leaf in graph.front.leaves]
                    self.middle.write(tile, dx)
                    del dx
                del graph  # else its front lives through the next tile

    def to_the_input(self, hand_down: Callable[[Tile, Tensor], None]) -> None:
        """Every tile from the leaves of its front to its input."""
        for segment in reversed(self.segments):
            d_carry = self.passage.leaving(segment.number)
            for tile in segment.back():
                front = self.fronts.pop(tile.index) if self.keeps == "graphs" else self._front(tile)
                dx, d_carry = front.through(d_carry)
                hand_down(tile, dx)
                del front, dx  # else they live through the next tile
            self.passage.entered(segment.number, d_carry)
        if self.own_stream is not None:
            self.own_stream.free()

    def _graph(self, tile: Tile) -> HalvedGraph:
        rows = rows_of(self.choices, tile)
        graph: HalvedGraph = self.passage.graph(
            tile, self._read(tile), self.borders.at(tile.index), rows, choose=False
        )
        return graph

    def _front(self, tile: Tile) -> Front:
        """The first half again, with the gradients in the middle as the first stage left them."""
        assert self.middle is not None
        front: Front = self.passage.front(tile, self._read(tile), self.borders.at(tile.index))
        grads = [self.middle.read(tile), *self.parts.pop(tile.index)]
        for leaf, grad in zip(front.leaves, grads, strict=True):
            leaf.grad = grad
        return front

    def _read(self, tile: Tile) -> Tensor:
        return self.walk._read(self.stream, tile)


def read_tails(read: Read, segments: Iterable[SegmentTiles], counts: Sequence[int], like: Tensor) -> Tensor:
    """The last rows of each segment, as many as `counts` says, one segment after the other.

    Args:
        like: rows of the same shape, for a rank that has no segment.
    """
    found: list[Tensor] = [like[:0]]
    for segment, count in zip(segments, counts, strict=True):
        wanted = like.new_empty(count, 0)
        parts = [read(tile)[len(tile) - len(part) :] for tile, part in _last_rows(segment, wanted)]
        found += reversed(parts)
    return torch.cat(found)


def _last_rows(segment: SegmentTiles, rows: Tensor) -> Iterable[tuple[Tile, Tensor]]:
    """The tiles that hold a segment's last rows, last tile first, each with its part of `rows`."""
    for tile in segment.back():
        if not len(rows):
            return
        part = rows[max(0, len(rows) - len(tile)) :]
        rows = rows[: len(rows) - len(part)]
        yield tile, part


def _taken(leaf: Tensor) -> Tensor:
    """A leaf's gradient, zeros where nothing reached it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
