"""One pass of a pack through the layers and back, a layer after the other, each tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longstrand.memory.borders import Borders
from longstrand.memory.levers import Levers, kept_inputs
from longstrand.memory.protocol import Choices, ScanEnd, ScanLayer, SideLosses, TileGraph
from longstrand.memory.store import first_trained, open_streams, pass_demand
from longstrand.memory.streams import Stream, Streams
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.ops.precision import wide_dtype
from longstrand.parallel import local_part


@dataclass
class Walk:
    """One pass of a pack through the layers and back; owns all that is kept between the two."""

    embedding: Tensor
    tokens: Tensor
    layers: Sequence[ScanLayer]
    layout: PackLayout
    hc_mult: int
    levers: Levers
    side: SideLosses
    end: ScanEnd
    keeps: bool = True  # what backward needs
    inputs: dict[int, Stream] = field(default_factory=dict)
    borders: dict[int, Borders] = field(default_factory=dict)
    choices: dict[int, Choices] = field(default_factory=dict)
    graphs: dict[int, list[TileGraph]] = field(default_factory=dict)  # without recompute, in place of borders
    idle: dict[int, list[Callable[[], None]]] = field(default_factory=dict)  # ways back, without recompute
    carries: list[Any] | None = None  # a list: those after the last token are wanted, one per layer
    mean: Stream | None = None
    d_embedding: Tensor | None = None

    def forward(self) -> Tensor:
        """The end's output; what backward needs stays here."""
        self.first = first_trained(self.embedding, self.layers) if self.keeps else len(self.layers)
        self.store = self._open_store()
        with ExitStack() as unless_kept:
            unless_kept.callback(self.store.close)
            out = self._forward()
            if self.keeps:
                unless_kept.pop_all()
        return out

    def weights(self) -> Iterator[Tensor]:
        """All that the pass computes with, trained or not; of a sharded weight the rows that an optimizer moves."""
        yield self.embedding
        for layer in self.layers:
            yield from map(local_part, layer.parameters())
        yield from self.end.parameters()

    def _open_store(self) -> Streams:
        demand = pass_demand(
            self.embedding,
            self.layers,
            [stop - start for start, stop in self.layout.segments],
            self.levers,
            hc_mult=self.hc_mult,
            keeps_mean=self.keeps and self.end.reads_mean,
            shared=self.layout.shard is not None,
        )
        return open_streams(self.levers, demand, self.embedding.detach())

    def _forward(self) -> Tensor:
        out = self.end.new_output(self.layout.num_pack_tokens)
        if self.keeps and self.end.reads_mean:
            self.mean = self.store.new(self.embedding.shape[1])
        kept = kept_inputs(len(self.layers), self.first, self.levers.keep_every)
        stream: Stream | None = None
        running: Stream | None = None  # a stream that no one keeps: the next layer writes over what it reads
        for index in range(len(self.layers)):
            running = stream
            if index in kept and stream is not None:
                self.inputs[index], running = stream, None
            if index == len(self.layers) - 1:
                self._forward_layer(index, stream, partial(self._finish, out))
            else:
                above = running or self._new_stream()
                self._forward_layer(index, stream, above.write)
                stream = above
        if running is not None:
            running.free()
        return out

    def _forward_layer(self, index: int, source: Stream | None, put: Callable[[Tile, Tensor], None]) -> None:
        """Runs a layer's tiles; keeps of them what the walk back needs: carries, or graphs without recompute."""
        layer, kept, side = self.layers[index], index >= self.first, self.side
        choices = self._new_choices(index)
        carry, opened = layer.start(self.layout), None
        layer.gather_weights()
        if kept and self.levers.recompute:
            self.borders[index] = Borders(self.layout.num_tiles(self.levers.tile))
        elif kept:
            self.graphs[index], opened = [], layer.open(carry)
        for tile in self.layout.tiles(self.levers.tile):
            x, rows = self._read(source, tile), rows_of(choices, tile)
            if index in self.graphs:
                graph = layer.tile_graph(x, tile, carry, rows, opened, side, choose=True)
                self.graphs[index].append(graph)
                y, carry = graph.y.detach(), graph.carry
            else:
                if index in self.borders:
                    self.borders[index].push(layer.keep(carry))
                y, carry = layer.forward_tile(x, tile, carry, rows, side, choose=True)
            self._pass_on(index, tile, y, rows, put)
            del y  # else it lives through the next tile
        self._idle_forward(index, kept=kept)
        if self.carries is not None:
            self.carries.append(carry)
        layer.free_weights()

    def _pass_on(
        self, index: int, tile: Tile, y: Tensor, rows: Choices, put: Callable[[Tile, Tensor], None]
    ) -> None:
        if self.side.watch is not None:
            self.side.watch.output(index, tile, y)
        if self.side.choice_watch is not None:
            self.side.choice_watch.chosen(index, tile, rows)
        put(tile, y)

    def _new_choices(self, index: int) -> Choices:
        below = self.choices.get(index - 1, {})
        choices = self.layers[index].new_choices(self.layout.num_tokens, self.embedding.device, below)
        self.choices[index] = choices
        if index < self.first:
            self.choices.pop(index - 1, None)
        return choices

    def _finish(self, out: Tensor, tile: Tile, y: Tensor) -> None:
        mean = y.mean(dim=1)
        if self.mean is not None:
            self.mean.write(tile, mean)
        out[tile.positions] = self.end.forward_tile(mean, tile)

    def backward(self, d_out: Tensor) -> Tensor | None:
        """Walks the layers and tiles back; returns the embedding's gradient."""
        if self.embedding.requires_grad:
            dtype = wide_dtype(self.embedding.dtype)
            self.d_embedding = torch.zeros_like(self.embedding, dtype=dtype, requires_grad=False)
        with closing(self.store):
            if self.side.indexer == "warmup":
                self._warm_up()
            else:
                self._backward(d_out)
        return self.d_embedding

    def _backward(self, d_out: Tensor) -> None:
        if self.first == len(self.layers):
            for tile in self.layout.tiles_back(self.levers.tile):
                self._end_gradient(d_out, tile)
        dy: Stream | None = None
        for index in range(len(self.layers) - 1, self.first - 1, -1):
            self._rebuild_input(index)
            above = partial(self._end_gradient, d_out) if dy is None else dy.read
            dx = self._backward_layer(index, above, dy)
            if dy is not None:
                dy.free()
            dy = dx

    def _backward_layer(
        self, index: int, above: Callable[[Tile], Tensor], dy: Stream | None
    ) -> Stream | None:
        """Walks one layer back; its input's stream then holds the gradient of that input.

        Args:
            above: reads the gradient of a tile's output.
            dy: where that stands, if in a stream; it is freed afterwards.
        """
        stream, d_carry = self.inputs.pop(index, None), None
        graphs = self._graphs_back(index, stream)
        self.layers[index].gather_weights()
        self._idle_back(index)
        for tile in self.layout.tiles_back(self.levers.tile):
            dx, d_carry = next(graphs).back(above(tile), d_carry)
            self._hand_down(index, stream, tile, dx)
            del dx  # else it lives through the next tile
        self.layers[index].reduce_gradients()
        self.layers[index].free_weights()
        return stream

    def _hand_down(self, index: int, stream: Stream | None, tile: Tile, dx: Tensor) -> None:
        """The gradient of a tile's input, to the layer below or to the embedding."""
        if self.side.watch is not None:
            self.side.watch.gradient(index, tile.at, dx)
        if index > self.first and stream is not None:
            stream.write(tile, dx)
        elif self.d_embedding is not None:
            total = dx.to(self.d_embedding.dtype).sum(dim=1)
            self.d_embedding.index_add_(0, self.tokens[tile.positions], total)

    def _graphs_back(self, index: int, stream: Stream | None) -> Iterator[TileGraph]:
        """The graph of each tile, last one first: as it was kept, or recomputed."""
        layer, choices = self.layers[index], self.choices.pop(index)
        if not self.levers.recompute:
            graphs = self.graphs.pop(index)
            while graphs:
                yield graphs.pop()
            return
        borders = self.borders.pop(index)
        opened = layer.reopen(partial(self._read, stream), self.layout, self.levers.tile)
        for tile in self.layout.tiles_back(self.levers.tile):
            x, carry = self._read(stream, tile), layer.entering(borders.pop(), opened)
            rows = rows_of(choices, tile)
            yield layer.tile_graph(x, tile, carry, rows, opened, self.side, choose=False)

    def _end_gradient(self, d_out: Tensor, tile: Tile) -> Tensor:
        """The gradient of the last layer's output: that of the mean, shared by its streams."""
        mean = None if self.mean is None else self.mean.read(tile)
        d_mean = self.end.backward_tile(mean, d_out[tile.positions], tile)
        return (d_mean / self.hc_mult).unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()

    @torch.no_grad()
    def _rebuild_input(self, index: int) -> None:
        """Recomputes a layer's input that was not kept, with all of its group's below it: choices as made."""
        if index == 0 or index in self.inputs:
            return
        start = index - (index - self.first) % self.levers.keep_every
        stream = self.inputs.get(start)
        for below in range(start, index):
            layer, choices, above = self.layers[below], self.choices[below], self._new_stream()
            carry = layer.start(self.layout)
            layer.gather_weights()
            for tile in self.layout.tiles(self.levers.tile):
                x, rows = self._read(stream, tile), rows_of(choices, tile)
                y, carry = layer.forward_tile(x, tile, carry, rows, self.side, choose=False)
                above.write(tile, y)
                del y
            self._idle_forward(below, choose=False)
            layer.free_weights()
            self.inputs[below + 1] = stream = above

    def _warm_up(self) -> None:
        """Only indexers learn: no gradient enters a layer from above or leaves it below."""
        for index in range(len(self.layers) - 1, self.first - 1, -1):
            layer = self.layers[index]
            if layer.learns_to_select():
                self._rebuild_input(index)
                read = partial(self._read, self.inputs.get(index))
                layer.gather_weights()
                opened, d_carry = layer.reopen(read, self.layout, self.levers.tile), None
                for tile in self.layout.tiles_back(self.levers.tile):
                    d_carry = layer.warm_up_tile(read(tile), tile, d_carry, opened, self.side)
                layer.reduce_gradients()
                layer.free_weights()
            if (done := self.inputs.pop(index, None)) is not None:
                done.free()
            del self.choices[index], self.borders[index]

    @property
    def _missing_tiles(self) -> int:
        return (self.layout.most_tiles or 0) - self.layout.num_tiles(self.levers.tile)

    def _idle_forward(self, index: int, *, kept: bool = False, choose: bool = True) -> None:
        """Takes part in the tiles that other ranks have and this one has not."""
        backs = [self.layers[index].idle(self.side, choose=choose) for _ in range(self._missing_tiles)]
        if kept and not self.levers.recompute:
            self.idle[index] = backs

    def _idle_back(self, index: int) -> None:
        """The same on the way back, last tile first: what went there together comes back together."""
        if self.levers.recompute:
            for _ in range(self._missing_tiles):
                self.layers[index].idle(self.side, choose=False)()
        else:
            for back in reversed(self.idle.pop(index)):
                back()

    def _read(self, stream: Stream | None, tile: Tile) -> Tensor:
        """A tile of a layer's input; that of the first layer is the embedding copied to all streams."""
        if stream is not None:
            return stream.read(tile)
        rows = self.embedding.detach()[self.tokens[tile.positions]]
        return rows.unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()

    def _new_stream(self) -> Stream:
        return self.store.new(self.hc_mult, self.embedding.shape[1])


def rows_of(choices: Choices, tile: Tile) -> Choices:
    """A tile's choices; versions of their own, since a kept graph does not mind that later tiles fill in theirs."""
    return {name: value[tile.rows].data for name, value in choices.items()}
