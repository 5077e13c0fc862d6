"""A DSA tile's graph up to its latents and pool keys, and the buffers that collect their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.borders import Borders
from longstrand.memory.tiles import Tile
from longstrand.model.dsa import DsaCarry
from longstrand.model.index_keys import IndexKeys
from longstrand.model.layer import Cut

if TYPE_CHECKING:
    from longstrand.model.dsa_layer import DsaLayer


@dataclass
class DsaOpened:
    """A DSA layer's buffers during its walk back, and their gradients in float32."""

    appended: DsaCarry  # after the last tile
    tails: Borders | None  # None while graphs are kept: they come with their carries
    d_latents: Tensor  # complete for a tile once all later tiles are done
    d_pool_keys: Tensor

    def enter_last(self) -> DsaCarry:
        """The carry that the last tile not yet walked back enters."""
        assert self.tails is not None
        return replace(self.appended, tail=self.tails.pop()[0])

    def d_tile(self, tile: Tile) -> Float[Tensor, "T L"]:
        """The complete gradient of a tile's latents."""
        return self.d_latents.index_select(0, tile.slots)

    def d_keys(self, pools: Int[Tensor, "P"]) -> Float[Tensor, "P DI"]:
        """The complete gradient of the keys that a tile has written."""
        return self.d_pool_keys.index_select(0, pools)


class DsaFront:
    """The first half of a tile's graph: hyper-connection, latents, pool keys where they learn.

    Kept per token in plain torch, beside the input and its gradient: what a `Cut` does, 2 L e and w bytes of e bytes
    per value and w per wide one. Measured as living tensors.

    Args:
        carry: as the tile enters it.
        through: False where no way back to the input is asked for.
    """

    def __init__(
        self,
        layer: DsaLayer,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        carry: DsaCarry,
        opened: DsaOpened,
        *,
        through: bool = True,
    ) -> None:
        self._attention, self._entered = layer.self_attn, carry
        self.tile, self.opened = tile, opened
        with torch.set_grad_enabled(through):
            self.cut = Cut(x, layer.enter_mixer)
            self.latents = self._attention.latents(self.h)
        self._keys: IndexKeys | None = None

    @property
    def h(self) -> Float[Tensor, "T D"]:
        """The mixer's input, a leaf."""
        return self.cut.leaves[0]

    @property
    def leaves(self) -> Sequence[Tensor]:
        return (self.cut.x, *self.cut.leaves)

    def learn(self, carry: DsaCarry) -> IndexKeys:
        """The tile's pool keys with a graph, and what it sees of others' in `carry`."""
        seen = replace(carry, tail=self._entered.tail)
        self._keys = IndexKeys(self._attention, self.h.detach(), self.tile, seen, self.opened.d_pool_keys)
        return self._keys

    def through(self, d_carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Once all later queries have added to the gradient of the tile's latents and keys."""
        grad = self.opened.d_tile(self.tile)
        torch.autograd.backward(self.latents, grad.to(self.latents.dtype))
        if self._keys is None:
            return self.cut.join(), None
        return self.cut.join(), self._keys.walk_back(d_carry, self.opened.d_keys(self._keys.pools))
