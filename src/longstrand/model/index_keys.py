"""How an indexer learns within a tile: its loss, and the pool keys that later tiles send gradients to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstrand.memory.protocol import SideLosses
from longstrand.memory.tiles import Tile
from longstrand.model.dsa import Dsa, DsaCarry
from longstrand.ops.dense_attention import pool_masses
from longstrand.ops.indexer_loss import dense_indexer_loss, selected_indexer_loss


class IndexKeys:
    """The indexer's part of a recomputed tile.

    Args:
        attention: a layer with an indexer.
        h: the mixer's input [T, D], detached: this loss reaches the indexer only.
        carry: what the tile enters; its pool keys are those of the whole pack.
        d_pool_keys: float32 gradient of all pool keys [P, DI], which the losses of tiles add to.
    """

    def __init__(self, attention: Dsa, h: Tensor, tile: Tile, carry: DsaCarry, d_pool_keys: Tensor) -> None:
        assert attention.indexer is not None
        self.attention, self.indexer = attention, attention.indexer
        self.h, self.tile, self.carry, self.d_pool_keys = h, tile, carry, d_pool_keys
        self.tail_before = carry.tail.detach().requires_grad_()
        self.pools, self.keys, self.tail_after = self.indexer.complete_pools(h, tile, self.tail_before)

    def selected_loss(self, q_resid: Tensor, pools: Tensor, mass: Tensor) -> Tensor:
        """Sum over rows of the KL on the selected pools, to be scaled and walked back by the caller."""
        q, weights = self.indexer.queries(self.h, q_resid)
        q = q * self.indexer.head_dim**-0.5
        return selected_indexer_loss(q, weights, self.carry.pool_keys, self.d_pool_keys, pools, mass)

    def dense_loss(self, q_resid: Tensor, side: SideLosses) -> tuple[list[Tensor], list[Tensor]]:
        """Adds the loss to `side`; returns the index queries and weights with their gradients."""
        attention, tile, carry = self.attention, self.tile, self.carry
        with torch.no_grad():
            queries = attention.queries(q_resid)
            dense = attention.attend_dense(queries, carry.latents, tile)
        q, weights = self.indexer.queries(self.h, q_resid)

        def target() -> Any:
            return pool_masses(
                queries, carry.latents, tile.first_pool, tile.num_visible, dense,
                kpool=attention.kpool, scale=attention.scale,
            )  # fmt: skip

        with torch.no_grad():
            loss, dq, d_weights = dense_indexer_loss(
                q, weights, carry.pool_keys, self.d_pool_keys, tile.first_pool, tile.num_visible,
                target, side.indexer_scale,
            )  # fmt: skip
        side.indexer_kl += loss
        return [q, weights], [dq, d_weights]

    def walk_back(self, d_tail_after: Tensor | None, d_keys: Tensor) -> Tensor:
        """Sends the complete gradient of this tile's pool keys on; returns that of the tail before it."""
        roots, grads = [self.keys], [d_keys.to(self.keys.dtype)]
        if d_tail_after is not None:
            roots.append(self.tail_after)
            grads.append(d_tail_after)
        torch.autograd.backward(roots, grads)
        return gradient_of(self.tail_before)


def gradient_of(leaf: Tensor) -> Tensor:
    """What reached a leaf, zeros where nothing did."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
