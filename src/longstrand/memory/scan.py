"""The one mechanism that bounds memory: a model is a scan over tiles.

    y[i], carry[i + 1] = layer(x[i], carry[i])

Forward runs the tiles without a graph and keeps layer inputs, the carries at tile borders and the choices (selected
pools, chosen experts). Backward walks the tiles in reverse: recompute one tile with a graph, backpropagate into its
input and its carry, free it. The gradient of a tile's input overwrites that input, so no stream is held beside the
inputs. Parameters receive their gradients tile by tile in float32.

Bytes kept per token: R x D x e for each input (of every layer but the first, or of every k-th), D x e for the last
output, and the choices; plus the carries at each tile border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.borders import Borders
from longstrand.memory.levers import Levers, kept_inputs
from longstrand.memory.protocol import Choices, MeanEnd, ScanEnd, ScanLayer, SideLosses, TileGraph
from longstrand.memory.store import first_trained, open_streams, pass_demand
from longstrand.memory.streams import Stream, Streams
from longstrand.memory.tile_walk import TileWalk
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.ops.precision import wide_dtype
from longstrand.parallel import local_part


def scan_layers(
    embedding: Float[Tensor, "W D"],
    tokens: Int[Tensor, "T"],
    layers: Sequence[ScanLayer],
    layout: PackLayout,
    *,
    hc_mult: int,
    levers: Levers,
    side: SideLosses,
    end: ScanEnd | None = None,
) -> Float[Tensor, "T ..."]:
    """What `end` makes of the mean over streams of the last layer's output; the mean itself without one.

    Differentiable by `.backward()`: the parameters of `layers` and `end` accumulate their gradients while the scan
    walks back; `autograd.grad` sees only the embedding. Without a graph a tile goes through all layers at once and
    only carries are kept (`TileWalk`): the same bits.
    """
    if not levers.recompute and (side.indexer == "warmup" or side.aux_scale):
        raise ValueError(
            "recompute = False: warm-up and the auxiliary loss need the counts of a whole pass first"
        )
    end = MeanEnd(embedding.detach()) if end is None else end
    trains = any(layer.trains() for layer in layers) or embedding.requires_grad or end.trains()
    if not (torch.is_grad_enabled() and trains):
        return TileWalk(embedding, layers, layout, hc_mult, side).through(tokens, levers.tile, end)
    walk = _Walk(embedding, tokens, layers, layout, hc_mult, levers, side, end)
    anchor = torch.zeros((), requires_grad=True, device=embedding.device)
    return _Scan.apply(embedding, anchor, walk)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedding: Tensor, anchor: Tensor, walk: _Walk) -> Tensor:
        ctx.walk = walk
        ctx.save_for_backward(*walk.weights())
        return walk.forward()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, None, None]:
        walk, ctx.walk = ctx.walk, None
        if walk is None:
            raise RuntimeError("a pass goes back once and frees what it kept; call token_logprobs again")
        # Torch's error where a weight was changed since: backward would recompute with the new one.
        _ = ctx.saved_tensors
        return walk.backward(d_out), None, None


@dataclass
class _Walk:
    """One pass of a pack through the layers and back; owns all that is kept between the two."""

    embedding: Tensor
    tokens: Tensor
    layers: Sequence[ScanLayer]
    layout: PackLayout
    hc_mult: int
    levers: Levers
    side: SideLosses
    end: ScanEnd
    inputs: dict[int, Stream] = field(default_factory=dict)
    borders: dict[int, Borders] = field(default_factory=dict)
    choices: dict[int, Choices] = field(default_factory=dict)
    graphs: dict[int, list[TileGraph]] = field(default_factory=dict)  # without recompute, in place of borders
    mean: Stream | None = None
    d_embedding: Tensor | None = None

    def forward(self) -> Tensor:
        """The end's output; what backward needs stays here."""
        self.first = first_trained(self.embedding, self.layers)
        self.store = self._open_store()
        with ExitStack() as unless_done:
            unless_done.callback(self.store.close)
            out = self._forward()
            unless_done.pop_all()
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
            self.layout.num_tokens,
            self.levers,
            hc_mult=self.hc_mult,
            keeps_mean=self.end.reads_mean,
        )
        return open_streams(self.levers, demand, self.embedding.detach())

    def _forward(self) -> Tensor:
        out = self.end.new_output(self.layout.num_tokens)
        if self.end.reads_mean:
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
        below = self.choices.get(index - 1, {})
        choices = layer.new_choices(self.layout.num_tokens, self.embedding.device, below)
        self.choices[index] = choices
        if not kept:
            self.choices.pop(index - 1, None)
        carry, opened = layer.start(self.layout), None
        layer.gather_weights()
        if kept and self.levers.recompute:
            self.borders[index] = Borders(self.layout.num_tiles(self.levers.tile))
        elif kept:
            self.graphs[index], opened = [], layer.open(carry)
        for tile in self.layout.tiles(self.levers.tile):
            x, rows = self._read(source, tile), _rows(choices, tile)
            if index in self.graphs:
                graph = layer.tile_graph(x, tile, carry, rows, opened, side, choose=True)
                self.graphs[index].append(graph)
                y, carry = graph.y.detach(), graph.carry
            else:
                if index in self.borders:
                    self.borders[index].push(layer.keep(carry))
                y, carry = layer.forward_tile(x, tile, carry, rows, side, choose=True)
            put(tile, y)
        layer.free_weights()

    def _finish(self, out: Tensor, tile: Tile, y: Tensor) -> None:
        mean = y.mean(dim=1)
        if self.mean is not None:
            self.mean.write(tile, mean)
        out[tile.rows] = self.end.forward_tile(mean, tile)

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
            dx = self._backward_layer(index, above)
            if dy is not None:
                dy.free()
            dy = dx

    def _backward_layer(self, index: int, above: Callable[[Tile], Tensor]) -> Stream | None:
        """Walks one layer back; its input's stream then holds the gradient of that input."""
        stream, d_carry = self.inputs.pop(index, None), None
        graphs = self._graphs_back(index, stream)
        self.layers[index].gather_weights()
        for tile in self.layout.tiles_back(self.levers.tile):
            dx, d_carry = next(graphs).back(above(tile), d_carry)
            if index > self.first and stream is not None:
                stream.write(tile, dx)
            elif self.d_embedding is not None:
                total = dx.to(self.d_embedding.dtype).sum(dim=1)
                self.d_embedding.index_add_(0, self.tokens[tile.rows], total)
        self.layers[index].reduce_gradients()
        self.layers[index].free_weights()
        return stream

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
            rows = _rows(choices, tile)
            yield layer.tile_graph(x, tile, carry, rows, opened, self.side, choose=False)

    def _end_gradient(self, d_out: Tensor, tile: Tile) -> Tensor:
        """The gradient of the last layer's output: that of the mean, shared by its streams."""
        mean = None if self.mean is None else self.mean.read(tile)
        d_mean = self.end.backward_tile(mean, d_out[tile.rows], tile)
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
                x, rows = self._read(stream, tile), _rows(choices, tile)
                y, carry = layer.forward_tile(x, tile, carry, rows, self.side, choose=False)
                above.write(tile, y)
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

    def _read(self, stream: Stream | None, tile: Tile) -> Tensor:
        """A tile of a layer's input; that of the first layer is the embedding copied to all streams."""
        if stream is not None:
            return stream.read(tile)
        rows = self.embedding.detach()[self.tokens[tile.rows]]
        return rows.unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()

    def _new_stream(self) -> Stream:
        return self.store.new(self.hc_mult, self.embedding.shape[1])


def _rows(choices: Choices, tile: Tile) -> Choices:
    """A tile's choices; versions of their own, since a kept graph does not mind that later tiles fill in theirs."""
    return {name: value[tile.rows].data for name, value in choices.items()}
