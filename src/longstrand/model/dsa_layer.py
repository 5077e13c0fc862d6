"""A sparse-attention layer in the scan: its carry is all that it has appended so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.memory.borders import Borders
from longstrand.memory.protocol import Choices, SideLosses, TileGraph
from longstrand.memory.shared_walk import Keeps, Read
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.model.dsa import Dsa, DsaCarry
from longstrand.model.dsa_front import DsaFront, DsaOpened
from longstrand.model.dsa_passage import DsaPassage
from longstrand.model.index_keys import IndexKeys
from longstrand.model.layer import Ends, Layer
from longstrand.ops.mhc import mhc_update


class DsaLayer(Layer):
    """DSA and a feed-forward part."""

    def __init__(self, shape: Architecture, index: int) -> None:
        super().__init__(shape, index)
        self.self_attn = Dsa(shape, index)

    def learns_to_select(self) -> bool:
        indexer = self.self_attn.indexer
        return indexer is not None and any(weight.requires_grad for weight in indexer.parameters())

    def start(self, layout: PackLayout) -> DsaCarry:
        return self.self_attn.start(layout)

    def new_choices(self, num_tokens: int, device: torch.device, before: Choices) -> Choices:
        pools = self.self_attn.new_choices(num_tokens, device, before)
        return {**pools, **self.expert_choices(num_tokens, device)}

    def mix(
        self,
        h: Float[Tensor, "T D"],
        tile: Tile,
        carry: DsaCarry,
        choices: Choices,
        side: SideLosses,
        *,
        choose: bool,
    ) -> tuple[Tensor, DsaCarry]:
        attention = self.self_attn
        if carry.rows is None:  # otherwise the ranks have gathered all that there is
            carry = attention.append(h, attention.latents(h), tile, carry)
        q_resid = attention.query_residual(h)
        if side.indexer == "warmup":
            out = attention.attend_dense(attention.queries(q_resid), carry.latents, tile).out
        else:
            if choose and attention.indexer is not None:
                choices["pools"].copy_(attention.select(h, q_resid, tile, carry))
            q = attention.queries(q_resid)
            out, _ = attention.attend(q, carry, None, choices["pools"], tile)
        return attention.project(out), carry

    def keep(self, carry: DsaCarry) -> tuple[()]:
        """Nothing: `reopen` appends again."""
        return ()

    def open(self, carry: DsaCarry) -> DsaOpened:
        grads = map(self.self_attn.new_gradient, (carry.latents, carry.pool_keys))
        return DsaOpened(carry, None, *grads)

    def reopen(self, read: Callable[[Tile], Tensor], layout: PackLayout, tile_size: int) -> DsaOpened:
        attention, carry, tails = self.self_attn, self.start(layout), Borders(layout.num_tiles(tile_size))
        with torch.no_grad():
            for tile in layout.tiles(tile_size):
                tails.push([carry.tail])
                h = self.enter_mixer(read(tile))[0]
                carry = attention.append(h, attention.latents(h), tile, carry)
        return replace(self.open(carry), tails=tails)

    def entering(self, kept: Sequence[Tensor], opened: DsaOpened) -> DsaCarry:
        return opened.enter_last()

    @torch.enable_grad()
    def tile_graph(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        carry: DsaCarry,
        choices: Choices,
        opened: DsaOpened,
        side: SideLosses,
        *,
        choose: bool,
    ) -> TileGraph:
        # Versions of their own: later tiles write to rows that this one does not read.
        entered = replace(carry, latents=carry.latents.data, pool_keys=carry.pool_keys.data)
        front = DsaFront(self, x, tile, entered, opened)
        carry = entered
        if choose:
            with torch.no_grad():
                carry = self.self_attn.append(front.h, front.latents, tile, entered)
        y, ends = self.rest(front, carry, choices, side, choose=choose)

        def back(dy: Tensor, d_carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
            ends.walk_back(y, dy)
            return front.through(d_carry)

        return TileGraph(y, carry, back)

    def rest(
        self, front: DsaFront, carry: DsaCarry, choices: Choices, side: SideLosses, *, choose: bool
    ) -> tuple[Tensor, Ends]:
        """From a tile's front, once its latents are among those of the carry, to the layer's output and open ends."""
        attention, tile, opened, ends = self.self_attn, front.tile, front.opened, Ends()
        h, post, comb = front.cut.leaves
        q_resid = attention.query_residual(h)
        if choose and attention.indexer is not None:
            with torch.no_grad():
                choices["pools"].copy_(attention.select(h, q_resid, tile, carry))
        q = attention.queries(q_resid)
        out, mass = attention.attend(q, carry, opened.d_latents, choices["pools"], tile)
        if side.indexer == "sparse" and self.learns_to_select():
            keys = front.learn(carry)
            loss = keys.selected_loss(q_resid.detach(), choices["pools"], mass)
            side.indexer_kl += float(loss.detach())
            ends.add(loss, loss.new_tensor(side.indexer_scale))
        x = mhc_update(front.cut.x, attention.project(out), post, comb)
        return self.feed_forward(x, choices, side, choose=choose, ends=ends), ends

    def meet(
        self, read: Read, layout: PackLayout, tile_size: int, side: SideLosses, keeps: Keeps
    ) -> DsaPassage:
        """The first of two passes forward where ranks share a pack; see `DsaPassage`."""
        return DsaPassage(self, read, layout, tile_size, side, keeps)

    def meet_again(
        self,
        passage: DsaPassage,
        read: Read,
        layout: PackLayout,
        tile_size: int,
        side: SideLosses,
        keeps: Keeps,
    ) -> DsaPassage:
        """On the way back: latents and pool keys are gathered anew."""
        return self.meet(read, layout, tile_size, side, keeps)

    @torch.enable_grad()
    def warm_up_tile(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        d_carry: Tensor | None,
        opened: DsaOpened,
        side: SideLosses,
    ) -> Tensor:
        attention, carry = self.self_attn, opened.enter_last()
        with torch.no_grad():
            h = self.enter_mixer(x)[0]
            q_resid = attention.query_residual(h)
        keys = IndexKeys(attention, h, tile, carry, opened.d_pool_keys)
        torch.autograd.backward(*keys.dense_loss(q_resid, side))
        return keys.walk_back(d_carry, opened.d_keys(keys.pools))
