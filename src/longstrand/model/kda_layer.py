"""A linear-attention layer in the scan: its carry is a state of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.memory.protocol import Choices, SideLosses, TileGraph
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.model.index_keys import gradient_of
from longstrand.model.kda import Kda, KdaCarry
from longstrand.model.layer import Cut, Ends, Layer
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
        cut, before, ends = Cut(x, self.enter_mixer), carry.leaf(), Ends()
        h, post, comb = cut.leaves
        out, after = self.self_attn(h, tile, before)
        x = mhc_update(cut.x, out, post, comb)
        y = self.feed_forward(x, choices, side, choose=choose, ends=ends)

        def back(dy: Tensor, d_carry: KdaCarry | None) -> tuple[Tensor, KdaCarry]:
            if d_carry is not None:
                ends.add(after.tail, d_carry.tail)
                ends.add(after.state, d_carry.state)
            ends.walk_back(y, dy)
            grads = (gradient_of(before.tail), gradient_of(before.state))
            return cut.join(), KdaCarry(*grads)

        return TileGraph(y, KdaCarry(after.tail.detach(), after.state.detach()), back)
