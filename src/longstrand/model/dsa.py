"""The sparse-attention mixer: MLA without positions, attending to pools that an indexer selects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.memory.protocol import Choices
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.model.indexer import Indexer
from longstrand.model.linear import Linear, Norm
from longstrand.ops.dense_attention import DenseAttention, dense_attention
from longstrand.ops.norm import rms_norm
from longstrand.ops.precision import wide_dtype
from longstrand.ops.sparse_attention import sparse_attention
from longstrand.parallel import local_part


@dataclass(frozen=True)
class DsaCarry:
    """What DSA has appended so far; the buffers are shared by all tiles of a layer and filled in place.

    L x e bytes per token for the latents and DI x e / kpool for the pool keys, of one layer at a time.
    """

    latents: Float[Tensor, "N L"]  # by slot; zero where no token is
    pool_keys: Float[Tensor, "P DI"]
    tail: Float[Tensor, "J DI2"]  # keys and gates of the last kpool - 1 tokens
    rows: Int[Tensor, "_"] | None = (
        None  # of each pool among the latents, where ranks gathered those of all tokens
    )


class Dsa(nn.Module):
    """Multi-head latent attention over selected pools; parameters carry the checkpoint's names."""

    def __init__(self, shape: Architecture, layer: int) -> None:
        super().__init__()
        self.heads, self.latent = shape.num_attention_heads, shape.kv_lora_rank
        self.qk_dim, self.v_dim = shape.qk_nope_head_dim, shape.v_head_dim
        self.scale, self.eps, self.kpool = self.qk_dim**-0.5, shape.rms_norm_eps, shape.index_kpool
        self.num_selected = shape.index_topk // shape.index_kpool
        width = shape.hidden_size
        self.q_a_proj, self.q_a_layernorm = Linear(width, shape.q_lora_rank), Norm(shape.q_lora_rank)
        self.q_b_proj = Linear(shape.q_lora_rank, self.heads * self.qk_dim)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Linear(width, self.latent), Norm(self.latent)
        self.kv_b_proj = Linear(self.latent, self.heads * (self.qk_dim + self.v_dim))
        self.o_proj = Linear(self.heads * self.v_dim, width)
        self.indexer = Indexer(shape) if shape.indexer_types[layer] == "full" else None

    def new_choices(self, num_tokens: int, device: torch.device, before: Choices) -> Choices:
        """Selected pool ids, 4 bytes each; a layer without an indexer shares those of the layer below."""
        if self.indexer is None:
            return {"pools": before["pools"]}
        return {"pools": torch.empty(num_tokens, self.num_selected, dtype=torch.int32, device=device)}

    def start(self, layout: PackLayout) -> DsaCarry:
        """Empty buffers for the whole pack."""
        weight = local_part(self.kv_b_proj.weight)
        pool_keys, tail = weight.new_zeros(0, 0), weight.new_zeros(0, 0)
        if self.indexer is not None:
            pool_keys = weight.new_zeros(layout.num_pools, self.indexer.head_dim)
            tail = weight.new_zeros(self.kpool - 1, 2 * self.indexer.head_dim)
        return DsaCarry(weight.new_zeros(layout.num_slots, self.latent), pool_keys, tail)

    def append(
        self, h: Float[Tensor, "T D"], latents: Float[Tensor, "T L"], tile: Tile, carry: DsaCarry
    ) -> DsaCarry:
        """Writes a tile's latents and the pools it completes; what a later tile needs of it is in the carry."""
        carry.latents.index_copy_(0, tile.slots, latents)
        if self.indexer is None:
            return carry
        pools, keys, tail = self.indexer.complete_pools(h, tile, carry.tail)
        carry.pool_keys.index_copy_(0, pools, keys)
        return DsaCarry(carry.latents, carry.pool_keys, tail)

    def select(
        self, h: Float[Tensor, "T D"], q_resid: Float[Tensor, "T Q"], tile: Tile, carry: DsaCarry
    ) -> Int[Tensor, "T I"]:
        assert self.indexer is not None
        return self.indexer.select(h, q_resid, tile, carry.pool_keys, self.num_selected)

    def latents(self, h: Float[Tensor, "T D"]) -> Float[Tensor, "T L"]:
        return rms_norm(self.kv_a_proj_with_mqa(h), self.kv_a_layernorm.weight, self.eps)

    def query_residual(self, h: Float[Tensor, "T D"]) -> Float[Tensor, "T Q"]:
        return rms_norm(self.q_a_proj(h), self.q_a_layernorm.weight, self.eps)

    def queries(self, q_resid: Float[Tensor, "T Q"]) -> Float[Tensor, "T H L"]:
        """Queries in latent space: the key projection is absorbed, keys are never formed."""
        q = self.q_b_proj(q_resid).unflatten(-1, (self.heads, self.qk_dim))
        return (
            torch.bmm(q.transpose(0, 1), self._key_value_weights()[:, : self.qk_dim])
            .transpose(0, 1)
            .contiguous()
        )

    def project(self, out: Float[Tensor, "T H L"]) -> Float[Tensor, "T D"]:
        """Values from latent outputs, then the output projection."""
        values = torch.bmm(out.transpose(0, 1), self._key_value_weights()[:, self.qk_dim :].mT)
        return self.o_proj(values.transpose(0, 1).flatten(-2))

    def attend(
        self,
        q: Float[Tensor, "T H L"],
        carry: DsaCarry,
        d_latents: Float[Tensor, "N L"] | None,
        pools: Int[Tensor, "T I"],
        tile: Tile,
    ) -> tuple[Tensor, Tensor]:
        """Latent outputs [T, H, L] and the mass of each selected pool [T, I]."""
        if carry.rows is not None:
            pools = torch.where(pools < 0, pools, carry.rows.int()[pools.clamp(min=0).long()])
        slots, scale = tile.slots, self.scale
        return sparse_attention(q, carry.latents, d_latents, pools, slots, kpool=self.kpool, scale=scale)

    def attend_dense(
        self, q: Float[Tensor, "T H L"], latents: Float[Tensor, "N L"], tile: Tile
    ) -> DenseAttention:
        """The same without selection, for warm-up; the latents in the order of the pack."""
        return dense_attention(
            q,
            latents,
            tile.first_pool * self.kpool + tile.offsets,
            tile.first_pool,
            tile.num_visible,
            kpool=self.kpool,
            scale=self.scale,
        )

    def new_gradient(self, buffer: Tensor) -> Tensor:
        """A buffer's gradient in float32 or wider."""
        return torch.zeros_like(buffer, dtype=wide_dtype(buffer.dtype))

    def _key_value_weights(self) -> Tensor:
        return self.kv_b_proj.weight.view(self.heads, self.qk_dim + self.v_dim, self.latent)
