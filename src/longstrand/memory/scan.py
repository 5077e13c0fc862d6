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

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.levers import Levers
from longstrand.memory.protocol import MeanEnd, ScanEnd, ScanLayer, SideLosses
from longstrand.memory.shared_walk import SharedWalk
from longstrand.memory.tile_walk import TileWalk
from longstrand.memory.tiles import PackLayout
from longstrand.memory.walk import Walk


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
    only carries are kept (`TileWalk`): the same bits. Where several ranks share the pack (`layout.shard`), each one
    computes its own tokens (`SharedWalk`), and those of others are zero in what is returned. Ranks that share
    weights or experts go through the model layer by layer, with a graph or without (`layout.most_tiles`).
    """
    if not levers.recompute and (side.indexer == "warmup" or side.aux_scale):
        raise ValueError(
            "recompute = False: warm-up and the auxiliary loss need the counts of a whole pass first"
        )
    end = MeanEnd(embedding.detach()) if end is None else end
    trains = any(layer.trains() for layer in layers) or embedding.requires_grad or end.trains()
    keeps = torch.is_grad_enabled() and trains
    kind = Walk if layout.shard is None else SharedWalk
    if not keeps and kind is Walk and layout.most_tiles is None and side.watch is None:
        return TileWalk(embedding, layers, layout, hc_mult, side).through(tokens, levers.tile, end)
    walk = kind(embedding, tokens, layers, layout, hc_mult, levers, side, end, keeps)
    if not keeps:
        with torch.no_grad():
            return walk.forward()
    anchor = torch.zeros((), requires_grad=True, device=embedding.device)
    return _Scan.apply(embedding, anchor, walk)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedding: Tensor, anchor: Tensor, walk: Walk) -> Tensor:
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
