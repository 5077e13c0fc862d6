"""What a document leaves behind, for decoding to go on from: each layer's carry and the last token's mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.levers import Levers
from longstrand.memory.protocol import MeanEnd, ScanLayer, SideLosses
from longstrand.memory.shared_walk import SharedWalk
from longstrand.memory.tile_walk import TileWalk
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.memory.walk import Walk


@torch.no_grad()
def prefix_of(
    embedding: Float[Tensor, "W D"],
    tokens: Int[Tensor, "T"],
    layers: Sequence[ScanLayer],
    layout: PackLayout,
    *,
    hc_mult: int,
    tile: int,
) -> tuple[Float[Tensor, "1 D"], list[Any]]:
    """The mean over streams of the last token's output, and each layer's carry after it.

    On one process a tile goes through all layers at once (`TileWalk`), and nothing else is kept. Where ranks share the
    document, weights or experts, they go layer by layer: a rank holds two streams of its own tokens, 2 R D e bytes for
    each, beside the carries of the whole document. All ranks that share it get the same.
    """
    side = SideLosses()
    if layout.shard is None and layout.most_tiles is None:
        through = TileWalk(embedding, layers, layout, hc_mult, side)
        for each in layout.tiles(tile):
            mean = through.step(tokens[each.positions], each)
        return mean[-1:], through.carries
    kind, end = Walk if layout.shard is None else SharedWalk, _LastMean(embedding, layout)
    walk = kind(embedding, tokens, layers, layout, hc_mult, Levers(tile=tile), side, end, False, carries=[])
    walk.forward()
    assert walk.carries is not None
    if layout.shard is None:
        return end.mean, walk.carries
    return layout.shard.axis.share(end.mean, layout.shard.deal.owners[-1], "last mean"), walk.carries


class _LastMean(MeanEnd):
    """Keeps the mean of the pack's last token, where this rank computes it."""

    def __init__(self, like: Float[Tensor, "W D"], layout: PackLayout) -> None:
        super().__init__(like[:, :0])
        self._last = layout.num_pack_tokens
        self.mean = like.new_zeros(1, like.shape[1])

    def forward_tile(self, mean: Float[Tensor, "T D"], tile: Tile) -> Tensor:
        if tile.positions.stop == self._last:
            self.mean = mean[-1:].clone()
        return mean[:, :0]
