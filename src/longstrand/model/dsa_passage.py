"""Latents and pool keys of all ranks that share a pack: gathered for their queries, their gradients given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.borders import Borders
from longstrand.memory.protocol import Choices, SideLosses
from longstrand.memory.shared_walk import HalvedGraph, Keeps, Read, read_tails
from longstrand.memory.tiles import PackLayout, SegmentTiles, Tile
from longstrand.model.dsa import DsaCarry
from longstrand.model.dsa_front import DsaFront, DsaOpened
from longstrand.model.index_keys import IndexKeys
from longstrand.model.layer import Cut, Site
from longstrand.ops.precision import wide_dtype

if TYPE_CHECKING:
    from longstrand.model.dsa_layer import DsaLayer


@dataclass
class _Gathered(DsaOpened):
    """The gradients of what was gathered; those of this rank's own rows are complete once they have been exchanged.

    Attributes:
        first_slot: of this rank's block.
        first_pool: likewise.
        d_own_latents: of its block.
        d_own_keys: likewise.
    """

    first_slot: int = 0
    first_pool: int = 0
    d_own_latents: Tensor | None = None
    d_own_keys: Tensor | None = None

    def d_tile(self, tile: Tile) -> Float[Tensor, "T L"]:
        assert self.d_own_latents is not None
        return self.d_own_latents.index_select(0, tile.slots - self.first_slot)

    def d_keys(self, pools: Int[Tensor, "P"]) -> Float[Tensor, "P DI"]:
        assert self.d_own_keys is not None
        return self.d_own_keys.index_select(0, pools - self.first_pool)


class DsaPassage:
    """What a DSA layer's queries see of all ranks.

    Forward: latents (L) of all tokens, gathered and kept in the order of ranks, and the key of each complete pool (DI),
    put into the order of the pack, in which the lowest of equal scores wins as on one rank. Queries stay where they
    are. Backward: the float32 gradients of both are summed over ranks, and each gets those of its own rows.

    Bytes: L e + DI e / kpool per token of the whole pack on every rank, 1,088 at 512 and 128 in bfloat16; as many
    values in float32 come back. The kpool - 1 rows before each segment complete the pools that begin in an earlier one.
    """

    def __init__(
        self,
        layer: DsaLayer,
        read: Read,
        layout: PackLayout,
        tile_size: int,
        side: SideLosses,
        keeps: Keeps,
    ) -> None:
        assert layout.shard is not None and layout.blocks is not None
        self._layer, self._side, self._attention = layer, side, layer.self_attn
        self._axis, self._blocks, self._kpool = layout.shard.axis, layout.blocks, layout.kpool
        self._own_slots = slice(self._blocks.own.start * self._kpool, self._blocks.own.stop * self._kpool)
        self._halo = layout.halo(self._kpool - 1)
        self._keeps = keeps
        self._fronts: dict[int, DsaFront] = {}
        self._sites: dict[int, Site] = {}
        self._tile_tails = Borders(layout.num_tiles(tile_size))
        self._first_slots: list[int] = []
        segments = layout.segment_tiles(tile_size)
        like = layer.input_layernorm.weight.new_empty(0, layer.shape.hc_mult, layer.shape.hidden_size)
        with torch.no_grad():
            self._tails = read_tails(read, segments, self._halo.tails, like)
            before = self._halo.fetch(self._halo_rows(layer.enter_mixer(self._tails)[0]), "DSA halo")
        self._d_before = torch.zeros_like(before, dtype=wide_dtype(before.dtype))
        self._latents, self._pool_keys = self._new_buffers(before)
        self._last_owner = layout.shard.deal.owners[-1]
        self._last_tail = before.new_zeros(self._kpool - 1, before.shape[-1] - self._attention.latent)
        for segment in segments:
            self._append(segment, read, before[segment.number])
        self._gather()

    @property
    def num_tails(self) -> Sequence[int]:
        return self._halo.tails

    def entering(self, segment: int) -> DsaCarry:
        return self._carry

    @torch.no_grad()
    def after(self, carry: DsaCarry | None) -> DsaCarry:
        """All latents in the order of the pack, a copy, and the last tokens' keys and gates, kpool - 1 of them."""
        by_pool = self._carry.latents.view(self._blocks.num_pools, -1)
        latents = by_pool.index_select(0, self._blocks.rows).view(-1, self._attention.latent)
        if self._attention.indexer is None:
            return DsaCarry(latents, latents.new_zeros(0, 0), latents.new_zeros(0, 0))
        tail = self._axis.share(self._last_tail, self._last_owner, "DSA tail")
        return DsaCarry(latents, self._carry.pool_keys, tail)

    def rest(self) -> None:
        """Forward is done: everything is gathered again on the way back."""
        del self._carry, self._latents, self._pool_keys, self._tile_tails

    def forward_tile(
        self, tile: Tile, x: Tensor, carry: DsaCarry, choices: Choices, *, choose: bool
    ) -> tuple[Tensor, DsaCarry]:
        layer, site = self._layer, self._sites.pop(tile.index, None)
        if site is None:
            return layer.forward_tile(x, tile, carry, choices, self._side, choose=choose)
        out, carry = layer.mix(site[0], tile, carry, choices, self._side, choose=choose)
        return layer.leave_mixer(x, site, out, choices, self._side, choose=choose), carry

    def graph(self, tile: Tile, x: Tensor, kept: Any, choices: Choices, *, choose: bool) -> HalvedGraph:
        front = self._fronts.pop(tile.index, None)
        if front is None:
            front = DsaFront(self._layer, x, tile, self._entered(tile), self._opened, through=False)
        with torch.enable_grad():
            y, ends = self._layer.rest(front, self._carry, choices, self._side, choose=choose)
        return HalvedGraph(y, self._carry, front, lambda dy: ends.walk_back(y, dy))

    @torch.enable_grad()
    def front(self, tile: Tile, x: Tensor, kept: Any) -> DsaFront:
        front = DsaFront(self._layer, x, tile, self._entered(tile), self._opened)
        if self._side.indexer == "sparse" and self._layer.learns_to_select():
            front.learn(self._carry)
        return front

    def halved(self, segment: int, front: DsaFront) -> None:
        """Nothing: gradients add up in the buffers."""

    def exchange_back(self) -> None:
        opened = self._opened
        opened.d_own_latents = self._axis.scatter_sum(opened.d_latents, "DSA latent gradients")
        self._exchange_keys_back()

    def leaving(self, segment: int) -> None:
        """Nothing: the gradients of what later segments see of this one come by `tails_back`."""

    def entered(self, segment: int, d_carry: Tensor | None) -> None:
        """Gradients of the rows before a segment: latents in its first pool, keys and gates."""
        width, opened = self._attention.latent, self._opened
        if d_carry is not None:
            self._d_before[segment, :, width:] = d_carry
        count = self._first_slots[segment] % self._kpool
        if opened.d_own_latents is not None and count:
            slot = self._first_slots[segment]
            self._d_before[segment, -count:, :width] = opened.d_own_latents[slot - count : slot]

    def tails_back(self) -> Float[Tensor, "N R D"]:
        d_rows = self._halo.give_back(self._d_before, "DSA halo gradients")
        if not len(self._tails):  # a rank without tokens
            return self._tails
        with torch.enable_grad():
            cut = Cut(self._tails, self._layer.enter_mixer)
            rows = self._halo_rows(cut.leaves[0])
        torch.autograd.backward(rows, d_rows.to(rows.dtype))
        return cut.join()

    @torch.enable_grad()
    def warm_up(self, read: Read, segments: Sequence[SegmentTiles]) -> None:
        """Adds the indexer's loss and its gradients, from all tiles and ranks."""
        for segment in reversed(segments):
            for tile in segment.back():
                keys = self._index_keys(read(tile), tile)
                q_resid = self._attention.query_residual(keys.h)
                torch.autograd.backward(*keys.dense_loss(q_resid, self._side))
        self._exchange_keys_back()
        for segment in reversed(segments):
            d_tail: Tensor | None = None
            for tile in segment.back():
                keys = self._index_keys(read(tile), tile)
                d_tail = keys.walk_back(d_tail, self._opened.d_keys(keys.pools))
            self.entered(segment.number, d_tail)
        d_rows = self._halo.give_back(self._d_before, "DSA halo gradients")
        if not len(self._tails):
            return
        with torch.no_grad():
            h = self._layer.enter_mixer(self._tails)[0]
        rows = self._halo_rows(h)
        torch.autograd.backward(rows, d_rows.to(rows.dtype))

    @cached_property
    def _opened(self) -> _Gathered:
        """The gradients of all that is gathered, zero so far."""
        wide, rows = wide_dtype(self._latents.dtype), self._blocks.rows
        d_latents = self._latents.new_zeros(
            self._blocks.num_pools * self._kpool, self._attention.latent, dtype=wide
        )
        d_keys = self._pool_keys.new_zeros(len(rows), self._pool_keys.shape[1], dtype=wide)
        own = self._blocks.own.start
        return _Gathered(
            DsaCarry(self._latents, self._pool_keys, self._latents[:0]), None, d_latents, d_keys,
            first_slot=own * self._kpool, first_pool=own,
        )  # fmt: skip

    def _new_buffers(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Latents by slot and pool keys of this rank's block."""
        own, indexer = self._blocks.own, self._attention.indexer
        pools = own.stop - own.start
        width = 0 if indexer is None else indexer.head_dim
        return like.new_zeros(pools * self._kpool, self._attention.latent), like.new_zeros(pools, width)

    def _append(self, segment: SegmentTiles, read: Read, before: Float[Tensor, "J C"]) -> None:
        """Writes a segment's latents and pools into this rank's block."""
        width, moved = self._attention.latent, self._own_slots.start
        tail = before[:, width:]
        for number, tile in enumerate(segment):
            own = replace(tile, slots=tile.slots - moved)
            if number == 0:
                slot = int(own.slots[0])
                self._first_slots.append(slot)
                if count := slot % self._kpool:
                    self._latents[slot - count : slot] = before[-count:, :width]
            self._tile_tails.push([tail])
            h, latents = self._project(read(tile), tile, tail)
            with torch.no_grad():
                carry = DsaCarry(self._latents, self._pool_keys, tail)
                tail = self._attention.append(h, latents, own, carry).tail
        self._last_tail = tail

    def _project(self, x: Tensor, tile: Tile, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The mixer's input and the latents of a tile; with the front kept, or without a graph."""
        if self._keeps == "graphs":
            carry = DsaCarry(self._latents, self._pool_keys, tail)
            with torch.enable_grad():
                front = self._fronts[tile.index] = DsaFront(self._layer, x, tile, carry, self._opened)
            return front.h.detach(), front.latents.detach()
        with torch.no_grad():
            site = self._layer.enter_mixer(x)
            if self._keeps == "values":
                self._sites[tile.index] = site
            return site[0], self._attention.latents(site[0])

    @torch.no_grad()
    def _gather(self) -> None:
        latents = self._axis.gather(self._latents, "DSA latents")
        keys = self._pool_keys.new_empty(len(self._blocks.rows), 0)
        if self._attention.indexer is not None:
            keys = self._axis.gather(self._pool_keys, "DSA pool keys").index_select(0, self._blocks.rows)
        if self._side.indexer == "warmup":  # dense attention goes along the pack
            by_pool = latents.view(self._blocks.num_pools, -1)
            latents = by_pool.index_select(0, self._blocks.rows).view(-1, latents.shape[1])
        self._carry = DsaCarry(latents, keys, latents[:0], self._blocks.rows)

    def _exchange_keys_back(self) -> None:
        opened = self._opened
        if self._layer.learns_to_select() and self._side.indexer != "frozen":
            d_keys = opened.d_pool_keys.new_zeros(self._blocks.num_pools, opened.d_pool_keys.shape[1])
            d_keys[self._blocks.rows] = opened.d_pool_keys
            opened.d_own_keys = self._axis.scatter_sum(d_keys, "DSA pool key gradients")

    def _entered(self, tile: Tile) -> DsaCarry:
        return replace(self._carry, tail=self._tile_tails.at(tile.index)[0])

    def _halo_rows(self, h: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        """What later segments may need of a row: its latent, its key and gate."""
        latents, indexer = self._attention.latents(h), self._attention.indexer
        if indexer is None:
            return latents
        brought = indexer.keys_and_gates(h.detach())  # the indexer's loss does not reach the input
        return torch.cat([latents, brought.detach() if self._side.indexer == "frozen" else brought], dim=-1)

    def _index_keys(self, x: Float[Tensor, "T R D"], tile: Tile) -> IndexKeys:
        """The pool keys of a tile with their graph."""
        with torch.no_grad():
            h = self._layer.enter_mixer(x)[0]
        return IndexKeys(self._attention, h, tile, self._entered(tile), self._opened.d_pool_keys)
