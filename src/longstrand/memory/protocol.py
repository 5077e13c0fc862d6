"""What the scan asks of a layer and of the end of the trunk, and what training asks of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.tiles import PackLayout, Tile

Choices = dict[str, Tensor]


@runtime_checkable
class Watch(Protocol):
    """Sees what passes between layers; for checks, since it slows a pass down."""

    def output(self, layer: int, tile: Tile, y: Float[Tensor, "T R D"]) -> None:
        """A tile of a layer's output, once per pass."""

    def gradient(self, layer: int, at: int, dx: Float[Tensor, "T R D"]) -> None:
        """To be added to the gradient of a layer's input, from position `at` of the pack on; several times for some."""


@runtime_checkable
class ChoiceWatch(Protocol):
    """Sees what layers choose, for measurements."""

    def chosen(self, layer: int, tile: Tile, choices: Choices) -> None:
        """What a layer chose for a tile, once per pass, in its first walk over the tiles.

        Args:
            choices: `pools` [T, I], counted through the pack and -1 where fewer are visible (not filled in during
                warm-up), and `experts` [T, A], where the layer has them; to be read within the call only.
        """


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
        watch: what sees the pass, for checks.
        choice_watch: what sees the choices of the pass, for measurements; it keeps the pass as it is.
    """

    indexer: Literal["frozen", "sparse", "warmup"] = "frozen"
    indexer_scale: float = 0.0
    aux_scale: float = 0.0
    expert_counts: dict[int, Tensor] = field(default_factory=dict)
    num_active: int = 0
    indexer_kl: float = 0.0
    aux: float = 0.0
    watch: Watch | None = None
    choice_watch: ChoiceWatch | None = None

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
class TileGraph:
    """One tile of a layer with its graph.

    Attributes:
        y: the layer's output.
        carry: what the tile hands on, without a graph.
        back: from the gradients of y and of the carry handed on (None for the last tile) to those of the tile's input
            and of the carry before it; called once, and frees the graph.
    """

    y: Tensor
    carry: Any
    back: Callable[[Tensor, Any], tuple[Tensor, Any]]


@runtime_checkable
class ScanLayer(Protocol):
    """What the scan asks of a layer; carries and their gradients are the layer's own business."""

    def start(self, layout: PackLayout) -> Any:
        """The carry before the first tile."""

    def new_choices(self, num_tokens: int, device: torch.device, before: Choices) -> Choices:
        """Empty rows for what the layer chooses per token; `before` are those of the layer below, to share."""

    def forward_tile(
        self, x: Tensor, tile: Tile, carry: Any, choices: Choices, side: SideLosses, *, choose: bool
    ) -> tuple[Tensor, Any]:
        """Output and next carry of one tile, without a graph.

        Args:
            choose: fills in the tile's choices and counts them; otherwise they are read, and nothing is counted: the
                same bits again.
        """

    def tile_graph(
        self,
        x: Tensor,
        tile: Tile,
        carry: Any,
        choices: Choices,
        opened: Any,
        side: SideLosses,
        *,
        choose: bool,
    ) -> TileGraph:
        """`forward_tile` with a graph; without `choose`, its side losses take part in it."""

    def open(self, carry: Any) -> Any:
        """What `tile_graph` needs of all tiles at once, before the first tile, whose carry is given."""

    def reopen(self, read: Callable[[Tile], Tensor], layout: PackLayout, tile_size: int) -> Any:
        """The same after the last tile, built again from the layer's input."""

    def keep(self, carry: Any) -> Sequence[Tensor]:
        """What `entering` needs of the carry at a tile border: equal shapes for all tiles, maybe nothing."""

    def entering(self, kept: Sequence[Tensor], opened: Any) -> Any:
        """The carry that a tile enters, last tile first; called once per tile of what `reopen` gave."""

    def warm_up_tile(self, x: Tensor, tile: Tile, d_carry: Any, opened: Any, side: SideLosses) -> Any:
        """Adds the indexer's loss of a tile and its gradients; returns the gradient of the carry before it."""

    def learns_to_select(self) -> bool:
        """Whether the layer has an indexer that receives gradients."""

    def trains(self) -> bool:
        """Whether a parameter of this layer receives a gradient."""

    def parameters(self) -> Iterator[Tensor]:
        """Its weights, which must be the same in backward."""

    def idle(self, side: SideLosses, *, choose: bool) -> Callable[[], None]:
        """Takes part, without a token, in what other ranks exchange for a tile; returns the same for its way back."""

    def gather_weights(self) -> None:
        """Before the first tile of a walk: whole weights where ranks hold parts of them."""

    def reduce_gradients(self) -> None:
        """After the last tile of a walk back, before `free_weights`: sums the gradients of this walk over ranks."""

    def free_weights(self) -> None:
        """After the last tile of a walk."""


@runtime_checkable
class ScanEnd(Protocol):
    """What becomes of the last layer's output, the mean over its streams, tile by tile."""

    reads_mean: bool
    """Whether backward needs the mean, which is then kept: D x e bytes per token."""

    def new_output(self, num_tokens: int) -> Tensor:
        """The end's output, one row per token, to be filled in by the scan."""

    def forward_tile(self, mean: Tensor, tile: Tile) -> Tensor:
        """The output of one tile [T, ...], without a graph."""

    def backward_tile(self, mean: Tensor | None, d_out: Tensor, tile: Tile) -> Tensor:
        """Gradient of a tile's mean; the end's parameters accumulate theirs."""

    def trains(self) -> bool:
        """Whether a parameter of the end receives a gradient."""

    def parameters(self) -> Iterator[Tensor]:
        """Its weights, which must be the same in backward."""


class MeanEnd:
    """The mean itself is the output: what `scan_layers` returns where no other end is given."""

    reads_mean = False

    def __init__(self, like: Float[Tensor, "W D"]) -> None:
        self._like = like

    def new_output(self, num_tokens: int) -> Float[Tensor, "T D"]:
        return self._like.new_empty(num_tokens, self._like.shape[1])

    def forward_tile(self, mean: Float[Tensor, "T D"], tile: Tile) -> Float[Tensor, "T D"]:
        return mean

    def backward_tile(self, mean: Tensor | None, d_out: Float[Tensor, "T D"], tile: Tile) -> Tensor:
        return d_out

    def trains(self) -> bool:
        return False

    def parameters(self) -> Iterator[Tensor]:
        return iter(())
