"""A linear-attention layer in the scan: its carry is a state of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.memory.protocol import Choices, SideLosses, TileGraph
from longstrand.memory.shared_walk import Keeps, Read
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.model.kda import Kda, KdaCarry
from longstrand.model.kda_passage import KdaFront, KdaPassage
from longstrand.model.layer import Ends, Layer
from longstrand.ops.mhc import mhc_update


class KdaLayer(Layer):
    """KDA and a feed-forward part."""

    def __init__(self, shape: Architecture, index: int) -> None:
        super().__init__(shape, index)
        self.self_attn = Kda(shape)

    def start(self, layout: PackLayout) -> KdaCarry:
        return self.self_attn.start()

    def new_choices(self, num_tokens: int, device: torch.device, before: Choices) -> Choices:
        return self.expert_choices(num_tokens, device)

    def mix(
        self,
        h: Float[Tensor, "T D"],
        tile: Tile,
        carry: KdaCarry,
        choices: Choices,
        side: SideLosses,
        *,
        choose: bool,
    ) -> tuple[Tensor, KdaCarry]:
        return self.self_attn(h, tile, carry)

    def keep(self, carry: KdaCarry) -> tuple[Tensor, Tensor]:
        return carry.tail, carry.state

    def open(self, carry: KdaCarry) -> None:
        return None

    def reopen(self, read: Callable[[Tile], Tensor], layout: PackLayout, tile_size: int) -> None:
        return None

    def entering(self, kept: Sequence[Tensor], opened: None) -> KdaCarry:
        return KdaCarry(*kept)

    @torch.enable_grad()
    def tile_graph(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        carry: KdaCarry,
        choices: Choices,
        opened: None,
        side: SideLosses,
        *,
        choose: bool,
    ) -> TileGraph:
        front = KdaFront(self, x, tile, carry.tail)
        front.recur(carry.state)
        y, ends = self.rest(front, choices, side, choose=choose)

        def back(dy: Tensor, d_carry: KdaCarry | None) -> tuple[Tensor, KdaCarry]:
            ends.walk_back(y, dy)
            return front.through(d_carry)

        return TileGraph(y, front.carry, back)

    def rest(
        self, front: KdaFront, choices: Choices, side: SideLosses, *, choose: bool
    ) -> tuple[Tensor, Ends]:
        """From the recurrence's output to the layer's, and its open ends."""
        h, post, comb = front.cut.leaves
        x, ends = mhc_update(front.cut.x, self.self_attn.project(h, front.out), post, comb), Ends()
        return self.feed_forward(x, choices, side, choose=choose, ends=ends), ends

    def meet(
        self, read: Read, layout: PackLayout, tile_size: int, side: SideLosses, keeps: Keeps
    ) -> KdaPassage:
        """The first of two passes forward where ranks share a pack; see `KdaPassage`."""
        return KdaPassage(self, read, layout, tile_size, side, keeps)

    def meet_again(
        self,
        passage: KdaPassage,
        read: Read,
        layout: PackLayout,
        tile_size: int,
        side: SideLosses,
        keeps: Keeps,
    ) -> KdaPassage:
        """On the way back: what was exchanged is still there."""
        passage.keeps = keeps
        return passage
