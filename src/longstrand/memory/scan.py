"""The one mechanism that bounds memory: a model is a scan over tiles.

    y[i], carry[i + 1] = layer(x[i], carry[i])

Forward runs the tiles without a graph and keeps each layer's input, the carries at tile borders and the choices
(selected pools, chosen experts). Backward walks the tiles in reverse: recompute one tile with a graph, backpropagate
into its input and its carry, free it. Parameters receive their gradients tile by tile in float32.

Bytes kept per token: (layers - 1) x R x D x e for the inputs, one stream-sized gradient R x D x e, 2 x D x e for the
last output and its gradient, and the choices; plus the carries at each tile border.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.tiles import PackLayout, Tile

Choices = dict[str, Tensor]


@dataclass
class SideLosses:
    """What training asks of a pass beside the log-probabilities, and what the pass reports.

    Attributes:
        indexer: `frozen`: nothing; `sparse`: KL over the selected pools while everything learns; `warmup`: dense
            attention and KL over all visible pools, only the indexer receives gradients.
        indexer_scale: factor of each row's KL (one over the step's rows and layers, times the loss weight).
        aux_scale: factor of the router's auxiliary loss of this pack.
        expert_counts: tokens per expert by layer, counted once, in the first pass.
        num_active: experts per token, as counted.
        indexer_kl: sum of the KL over rows and layers in nats, known after backward.
        aux: auxiliary loss of the pack (unscaled), known after backward.
    """

    indexer: Literal["frozen", "sparse", "warmup"] = "frozen"
    indexer_scale: float = 0.0
    aux_scale: float = 0.0
    expert_counts: dict[int, Tensor] = field(default_factory=dict)
    num_active: int = 0
    indexer_kl: float = 0.0
    aux: float = 0.0

    def __post_init__(self) -> None:
        if self.indexer not in ("frozen", "sparse", "warmup"):
            raise ValueError(f'indexer = {self.indexer!r}: must be "frozen", "sparse" or "warmup"')

    def count_experts(self, layer: int, ids: Int[Tensor, "T A"], num_experts: int) -> None:
        """Adds one tile's tokens per expert; called in the first pass only, never in recompute."""
        self.num_active = ids.shape[1]
        counts = torch.bincount(ids.flatten().long(), minlength=num_experts)
        before = self.expert_counts.get(layer)
        self.expert_counts[layer] = counts if before is None else before + counts


@dataclass
class Recomputed:
    """One tile of a layer, recomputed with a graph.

    Attributes:
        y: the layer's output.
        roots, root_grads: what else is backpropagated together with y (a carry handed on, side losses).
        close: called once that is done; finishes the tile and returns its input's gradient and that of its carry.
    """

    y: Tensor
    roots: list[Tensor]
    root_grads: list[Tensor]
    close: Callable[[], tuple[Tensor, Any]]


@runtime_checkable
class ScanLayer(Protocol):
    """What the scan asks of a layer; carries and their gradients are the layer's own business."""

    def start(self, layout: PackLayout) -> Any:
        """The carry before the first tile."""

    def new_choices(self, num_tokens: int, device: torch.device, before: Choices) -> Choices:
        """Empty rows for what the layer chooses per token; `before` are those of the layer below, to share."""

    def forward_tile(
        self, x: Tensor, tile: Tile, carry: Any, choices: Choices, side: SideLosses
    ) -> tuple[Tensor, Any]:
        """Output and next carry of one tile; fills in its choices."""

    def reopen(self, read: Callable[[Tile], Tensor], layout: PackLayout, tile_size: int) -> Any:
        """Rebuilds what backward needs of all tiles at once; its result goes to `recompute_tile`."""

    def recompute_tile(
        self, x: Tensor, tile: Tile, carry: Any, d_carry: Any, choices: Choices, opened: Any, side: SideLosses
    ) -> Recomputed:
        """The same tile with a graph and the choices as they were made; d_carry is None for the last tile."""

    def warm_up_tile(self, x: Tensor, tile: Tile, d_carry: Any, opened: Any, side: SideLosses) -> Any:
        """Adds the indexer's loss of a tile and its gradients; returns the gradient of the carry before it."""

    def learns_to_select(self) -> bool:
        """Whether the layer has an indexer that receives gradients."""

    def trains(self) -> bool:
        """Whether a parameter of this layer receives a gradient."""


def scan_layers(
    embedding: Float[Tensor, "W D"],
    tokens: Int[Tensor, "T"],
    layers: Sequence[ScanLayer],
    layout: PackLayout,
    *,
    streams: int,
    tile: int,
    side: SideLosses,
) -> Float[Tensor, "T D"]:
    """The mean over streams of the last layer's output.

    Differentiable by `.backward()`: the parameters of `layers` accumulate their gradients while the scan walks back;
    `autograd.grad` sees only the embedding. Under `no_grad` nothing is kept.
    """
    walk = _Walk(embedding, tokens, layers, layout, streams, tile, side)
    trains = any(layer.trains() for layer in layers) or embedding.requires_grad
    if not (torch.is_grad_enabled() and trains):
        with torch.no_grad():
            return walk.forward(keep=False)
    anchor = torch.zeros((), requires_grad=True, device=embedding.device)
    return _Scan.apply(embedding, anchor, walk)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedding: Tensor, anchor: Tensor, walk: _Walk) -> Tensor:
        ctx.walk = walk
        return walk.forward(keep=True)

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor) -> tuple[Tensor | None, None, None]:
        walk, ctx.walk = ctx.walk, None
        if walk is None:
            raise RuntimeError("a pass goes back once and frees what it kept; call token_logprobs again")
        return walk.backward(d_mean), None, None


class _Walk:
    """One pass of a pack through the layers and back; owns all that is kept between the two."""

    def __init__(
        self,
        embedding: Tensor,
        tokens: Tensor,
        layers: Sequence[ScanLayer],
        layout: PackLayout,
        streams: int,
        tile_size: int,
        side: SideLosses,
    ) -> None:
        self.embedding, self.tokens, self.layers = embedding.detach(), tokens, layers
        self.trains_embedding = embedding.requires_grad
        self.layout, self.streams, self.tile_size, self.side = layout, streams, tile_size, side
        self.inputs: dict[int, Tensor] = {}
        self.carries: dict[int, list[Any]] = {}
        self.choices: dict[int, Choices] = {}

    def forward(self, keep: bool) -> Tensor:
        first = self._first_trained() if keep else len(self.layers)
        last = len(self.layers) - 1
        mean = self.embedding.new_empty(self.layout.num_tokens, self.embedding.shape[1])
        stream: Tensor | None = None
        for index, layer in enumerate(self.layers):
            kept = index >= first
            if kept and stream is not None:
                self.inputs[index] = stream
            out = None
            if index < last:
                reuse = stream is not None and not kept
                out = stream if reuse else mean.new_empty(len(mean), self.streams, mean.shape[1])
            self._forward_layer(index, layer, stream, mean if out is None else out, kept)
            stream = out
        return mean

    def _forward_layer(
        self, index: int, layer: ScanLayer, stream: Tensor | None, out: Tensor, kept: bool
    ) -> None:
        choices = layer.new_choices(self.layout.num_tokens, out.device, self.choices.get(index - 1, {}))
        self.choices[index] = choices
        carry, carries = layer.start(self.layout), []
        for tile in self.layout.tiles(self.tile_size):
            if kept:
                carries.append(carry)
            rows = {name: value[tile.rows] for name, value in choices.items()}
            y, carry = layer.forward_tile(self._read(stream, tile), tile, carry, rows, self.side)
            out[tile.rows] = y.mean(dim=1) if out.dim() == 2 else y
        if kept:
            self.carries[index] = carries
        else:
            self.choices.pop(index - 1, None)

    def backward(self, d_mean: Tensor) -> Tensor | None:
        """Walks the layers and tiles back; returns the embedding's gradient."""
        dy = None
        for index in range(len(self.layers) - 1, self._first_trained() - 1, -1):
            if self.side.indexer == "warmup":
                self._warm_up_layer(index)
            else:
                dy = self._backward_layer(index, d_mean if dy is None else dy)
        return self._embedding_gradient(dy) if self.trains_embedding and dy is not None else None

    def _backward_layer(self, index: int, above: Tensor) -> Tensor:
        """Gradient of a layer's input: in place over that of its output, once there is one per stream."""
        layer, stream = self.layers[index], self.inputs.pop(index, None)
        choices, carries = self.choices.pop(index), self.carries.pop(index)
        opened = layer.reopen(partial(self._read, stream), self.layout, self.tile_size)
        dx = above if above.dim() == 3 else above.new_empty(len(above), self.streams, above.shape[1])
        d_carry = None
        for tile in self.layout.tiles_back(self.tile_size):
            rows = {name: value[tile.rows] for name, value in choices.items()}
            done = layer.recompute_tile(
                self._read(stream, tile), tile, carries.pop(), d_carry, rows, opened, self.side
            )
            torch.autograd.backward([done.y, *done.roots], [self._above(above, tile), *done.root_grads])
            dx[tile.rows], d_carry = done.close()
        return dx

    def _warm_up_layer(self, index: int) -> None:
        """Only indexers learn: no gradient enters a layer from above or leaves it below."""
        layer, stream = self.layers[index], self.inputs.pop(index, None)
        del self.choices[index], self.carries[index]
        if layer.learns_to_select():
            opened = layer.reopen(partial(self._read, stream), self.layout, self.tile_size)
            d_carry = None
            for tile in self.layout.tiles_back(self.tile_size):
                d_carry = layer.warm_up_tile(self._read(stream, tile), tile, d_carry, opened, self.side)

    def _read(self, stream: Tensor | None, tile: Tile) -> Tensor:
        """A tile of a layer's input; that of the first layer is the embedding copied to all streams."""
        if stream is not None:
            return stream[tile.rows]
        rows = self.embedding[self.tokens[tile.rows]]
        return rows.unsqueeze(1).expand(-1, self.streams, -1).contiguous()

    def _above(self, source: Tensor, tile: Tile) -> Tensor:
        """The gradient of a tile's output; that of the last layer is the mean's, shared by its streams."""
        if source.dim() == 3:
            return source[tile.rows]
        return (source[tile.rows] / self.streams).unsqueeze(1).expand(-1, self.streams, -1).contiguous()

    def _embedding_gradient(self, dx: Tensor) -> Tensor:
        grad = torch.zeros_like(self.embedding, dtype=torch.promote_types(dx.dtype, torch.float32))
        for tile in self.layout.tiles(self.tile_size):
            grad.index_add_(0, self.tokens[tile.rows], dx[tile.rows].to(grad.dtype).sum(dim=1))
        return grad

    def _first_trained(self) -> int:
        """The walk back ends at the lowest layer with something to train."""
        if self.trains_embedding:
            return 0
        return next((i for i, layer in enumerate(self.layers) if layer.trains()), len(self.layers))
