"""Forward alone: a tile goes through all layers before the next one, so that only carries are kept.

The scan of `scan.py` goes layer by layer, since its backward needs each layer's input: R x D values per token. Without
a backward there is no need for them. What grows with the length are DSA's latents and pool keys:
L x e + DI x e / kpool bytes per token and DSA layer (160 in the toy, against 4,096 of two streams).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.protocol import Choices, ScanEnd, ScanLayer, SideLosses
from longstrand.memory.tiles import PackLayout, Tile


class TileWalk:
    """The layers and their carries; evaluation scores what it returns, generation goes on from its carries.

    Attributes:
        carries: of each layer, after the last tile so far.
    """

    def __init__(
        self,
        embedding: Float[Tensor, "W D"],
        layers: Sequence[ScanLayer],
        layout: PackLayout,
        hc_mult: int,
        side: SideLosses,
    ) -> None:
        self.embedding, self.layers, self.hc_mult, self.side = embedding, layers, hc_mult, side
        self.layout = layout
        self.carries: list[Any] = [layer.start(layout) for layer in layers]

    @torch.no_grad()
    def through(self, tokens: Int[Tensor, "T"], tile_size: int, end: ScanEnd) -> Float[Tensor, "T ..."]:
        """What `end` makes of every token of the pack."""
        out = end.new_output(self.layout.num_pack_tokens)
        for tile in self.layout.tiles(tile_size):
            out[tile.positions] = end.forward_tile(self.step(tokens[tile.positions], tile), tile)
        return out

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "T"], tile: Tile) -> Float[Tensor, "T D"]:
        """The mean over streams of the last layer's output; the same bits as the scan's."""
        x = self.embedding[tokens].unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()
        choices: Choices = {}
        for index, layer in enumerate(self.layers):
            choices = layer.new_choices(len(tile), x.device, choices)
            carry = self.carries[index]
            x, self.carries[index] = layer.forward_tile(x, tile, carry, choices, self.side, choose=True)
            if self.side.choice_watch is not None:
                self.side.choice_watch.chosen(index, tile, choices)
        return x.mean(dim=1)
