"""The indexer: one key per pool of tokens, light queries, and which pools each query selects."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.memory.tiles import Tile
from longstrand.model.linear import LayerNorm, Linear
from longstrand.ops.precision import wide
from longstrand.ops.select import select_pools


class Indexer(nn.Module):
    """Scores pools: sum_h w_h relu(q_h . k_pool DI^-0.5), in float32 or wider."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.heads, self.head_dim, self.kpool = shape.index_n_heads, shape.index_head_dim, shape.index_kpool
        self.wq_b = Linear(shape.q_lora_rank, self.heads * self.head_dim)
        self.wk, self.k_norm = Linear(shape.hidden_size, self.head_dim), LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = Linear(shape.hidden_size, self.heads)
        self.index_kpool_compress_ape = nn.Parameter(torch.empty(self.kpool, self.head_dim))
        self.index_kpool_compress_gate = nn.Parameter(torch.empty(self.head_dim, shape.hidden_size))

    def queries(
        self, h: Float[Tensor, "T D"], q_resid: Float[Tensor, "T Q"]
    ) -> tuple[Float[Tensor, "T H DI"], Float[Tensor, "T H"]]:
        """Index queries and head weights, in float32 or wider."""
        q = wide(self.wq_b(q_resid)).unflatten(-1, (self.heads, self.head_dim))
        return q, wide(self.weights_proj(h)) * self.heads**-0.5

    def select(
        self,
        h: Float[Tensor, "T D"],
        q_resid: Float[Tensor, "T Q"],
        tile: Tile,
        pool_keys: Float[Tensor, "P DI"],
        num_selected: int,
    ) -> Int[Tensor, "T I"]:
        """The pools that each query attends to, ids ascending, -1 where fewer are visible."""
        q, weights = self.queries(h, q_resid)
        return select_pools(q, weights, pool_keys, tile.first_pool, tile.num_visible, num_selected)

    def complete_pools(
        self, h: Float[Tensor, "T D"], tile: Tile, tail: Float[Tensor, "J DI2"]
    ) -> tuple[Int[Tensor, "P"], Float[Tensor, "P DI"], Float[Tensor, "J DI2"]]:
        """The pools whose last token lies in this tile, their keys, and the tail for the next tile.

        A pool that began in an earlier tile takes its first tokens from the tail.
        """
        joined = torch.cat([tail, self.keys_and_gates(h)])
        ends = (tile.offsets % self.kpool == self.kpool - 1).nonzero()[:, 0]
        members = joined[ends[:, None] + torch.arange(self.kpool, device=h.device)]  # P kpool 2DI
        tail = joined[len(joined) - (self.kpool - 1) :].clone()  # a view would keep the whole tile alive
        return tile.slots[ends] // self.kpool, self.pool_keys(members), tail

    def keys_and_gates(self, h: Float[Tensor, "T D"]) -> Float[Tensor, "T DI2"]:
        """What each token brings to its pool."""
        return torch.cat([self.k_norm(self.wk(h)), h @ self.index_kpool_compress_gate.T], dim=-1)

    def pool_keys(self, members: Float[Tensor, "P kpool DI2"]) -> Float[Tensor, "P DI"]:
        """The per-channel softmax over a pool's tokens of gate(x) + position bias, times their keys."""
        keys, gates = members.chunk(2, dim=-1)
        shares = (wide(gates) + wide(self.index_kpool_compress_ape)).softmax(dim=1)
        return (shares.to(keys.dtype) * keys).sum(dim=1)
