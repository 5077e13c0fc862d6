"""Decoding from the carry: a prompt's tiles, then tiles of one token for many sequences at once.

A prompt goes through `TileWalk`, the same layer code as training, and leaves each layer's carry behind. From there on a
tile is one token of each of B documents. Everything but the mixers' carries works on single tokens, so it is the same
code again; what is written here is how the carries of B documents lie side by side and take one token each.

Bytes per sequence: H K V float32 values and (J - 1) x 3 H K inputs per KDA layer, which do not grow; L x e + DI x e /
kpool per DSA layer for each token of the longest sequence of the batch. Buffers grow by doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory import SideLosses
from longstrand.memory.tiles import Tile
from longstrand.model.dsa import Dsa, DsaCarry
from longstrand.model.indexer import Indexer
from longstrand.model.kda import Kda, KdaCarry
from longstrand.model.layer import Layer
from longstrand.model.model import Model
from longstrand.ops.precision import wide
from longstrand.ops.select import select_own_pools


@dataclass(frozen=True)
class Prefix:
    """What a prompt leaves behind: its number of tokens, each layer's carry, and the last hidden state [D]."""

    length: int
    carries: list[KdaCarry | DsaCarry]
    hidden: Tensor


@torch.no_grad()
def prefill(model: Model, prompt: Int[Tensor, "T"], tile: int) -> Prefix:
    """Runs a prompt of at least one token through the model, tile by tile; the tile changes speed and memory only.

    Ranks of `context` share the prompt, and all that share weights or experts call this at the same time, each with
    the prompt of its `data` rank; every rank then has the whole of what its prompt leaves.
    """
    hidden, carries = model.prefix(prompt, tile)
    return Prefix(len(prompt), carries, hidden)


@torch.no_grad()
def idle_step(model: Model) -> None:
    """Takes part in a token that other ranks append (`Decoding.append`), without a sequence of its own."""
    side, layers = SideLosses(), [cast(Layer, layer) for layer in model.layers]
    for layer in layers:
        layer.gather_weights()
        layer.idle(side, choose=True)
        layer.free_weights()


class Decoding:
    """B sequences that grow by one token at a time.

    Args:
        prefixes: of B prompts; the same one may stand there several times, and is copied.
        room: tokens that are expected to come; buffers have space for them, and double beyond.

    Attributes:
        lengths: tokens of each sequence so far, int64[B].
        hidden: the last hidden state of each sequence, after the final norm, [B, D].
    """

    @torch.no_grad()
    def __init__(self, model: Model, prefixes: Sequence[Prefix], room: int = 256) -> None:
        self.model, device = model, model.norm.weight.device
        self.kpool = model.architecture.index_kpool
        self.lengths = torch.tensor([prefix.length for prefix in prefixes], device=device)
        self.hidden = torch.stack([prefix.hidden for prefix in prefixes])
        slots = int(self.lengths.max()) + max(room, 1)
        self.slots = -(-slots // self.kpool) * self.kpool  # of one sequence
        self.rows: list[_KdaRows | _DsaRows] = []
        for carries in zip(*(prefix.carries for prefix in prefixes), strict=True):
            kind = _KdaRows if isinstance(carries[0], KdaCarry) else _DsaRows
            self.rows.append(kind.stacked(carries, self.slots, self.kpool))

    def __len__(self) -> int:
        return len(self.lengths)

    @torch.no_grad()
    def logprobs(self) -> Float[Tensor, "B W"]:
        """log softmax over the vocabulary of each sequence's next token, float32 or wider."""
        with self.model.gathered():
            return wide(self.hidden @ self.model.lm_head.weight.T).log_softmax(-1)

    @torch.no_grad()
    def append(self, tokens: Int[Tensor, "B"]) -> None:
        """One more token of each sequence; where ranks share weights or experts, on all of them at once."""
        if int(self.lengths.max()) == self.slots:
            self.slots *= 2
            for rows in self.rows:
                rows.grow(self.slots)
        with self.model.gathered():
            self.hidden = self.model.last_norm(self._through_layers(tokens).mean(dim=1))
        self.lengths = self.lengths + 1

    def keep(self, which: Int[Tensor, "K"]) -> None:
        """Goes on with these sequences alone."""
        self.lengths, self.hidden = self.lengths[which], self.hidden[which]
        for rows in self.rows:
            rows.keep(which)

    def _through_layers(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B R D"]:
        tile, side = self._tile(), SideLosses()
        shape = self.model.architecture
        x = self.model.embed_tokens.weight[tokens].unsqueeze(1).expand(-1, shape.hc_mult, -1).contiguous()
        pools: Tensor | None = None
        layers: list[Any] = list(self.model.layers)
        for layer, rows in zip(layers, self.rows, strict=True):
            layer.gather_weights()
            x, pools = layer.step(x, partial(rows.step, layer.self_attn, tile=tile, pools=pools), side)
            layer.free_weights()
        return x

    def _tile(self) -> Tile:
        """One token of each document; document b owns the slots [b x slots, (b + 1) x slots)."""
        row = torch.arange(len(self), device=self.lengths.device)
        return Tile(
            start=0,
            stop=len(self),
            offsets=self.lengths,
            slots=row * self.slots + self.lengths,
            first_pool=row * (self.slots // self.kpool),
            num_visible=(self.lengths + 1) // self.kpool,
            first=None,
        )


class _KdaRows:
    """The carries of a KDA layer side by side; they take their next token in place."""

    def __init__(self, carry: KdaCarry) -> None:
        self.carry = carry  # of B documents

    @classmethod
    def stacked(cls, carries: Sequence[KdaCarry], slots: int, kpool: int) -> _KdaRows:
        tails, states = [each.tail for each in carries], [each.state for each in carries]
        return cls(KdaCarry(torch.cat(tails), torch.cat(states)))

    def step(self, kda: Kda, h: Tensor, tile: Tile, pools: Tensor | None) -> tuple[Tensor, None]:
        """The mixer's output [B, D]."""
        return kda.step(h, self.carry), None

    def keep(self, which: Tensor) -> None:
        self.carry = KdaCarry(self.carry.tail[which], self.carry.state[which])

    def grow(self, slots: int) -> None:
        """A state has a fixed size."""


class _DsaRows:
    """The carries of a DSA layer side by side, each with space for `slots` tokens; filled in place."""

    def __init__(
        self, latents: Float[Tensor, "B N L"], pool_keys: Float[Tensor, "B P DI"], tail: Tensor
    ) -> None:
        self.latents, self.pool_keys = latents, pool_keys
        self.tail = tail  # keys and gates of the last kpool - 1 tokens, B J DI2

    @classmethod
    def stacked(cls, carries: Sequence[DsaCarry], slots: int, kpool: int) -> _DsaRows:
        first = carries[0]
        latents = first.latents.new_zeros(len(carries), slots, first.latents.shape[1])
        pool_keys = first.pool_keys.new_zeros(len(carries), slots // kpool, first.pool_keys.shape[1])
        for row, carry in enumerate(carries):
            latents[row, : len(carry.latents)] = carry.latents
            pool_keys[row, : len(carry.pool_keys)] = carry.pool_keys
        return cls(latents, pool_keys, torch.stack([carry.tail for carry in carries]))

    def step(self, attention: Dsa, h: Tensor, tile: Tile, pools: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mixer's output [B, D], and the selected pools for a layer above that shares them."""
        q_resid = attention.query_residual(h)
        latents = self.latents.view(-1, self.latents.shape[-1])  # never a copy: it is written to
        latents.index_copy_(0, tile.slots, attention.latents(h))
        if attention.indexer is not None:
            self._complete_pools(attention.indexer, h, tile)
            q, weights = attention.indexer.queries(h, q_resid)
            own = select_own_pools(q, weights, self.pool_keys, tile.num_visible, attention.num_selected)
            pools = torch.where(own < 0, own, own + tile.first_pool[:, None])
        assert pools is not None
        carry = DsaCarry(latents, self.pool_keys.flatten(0, 1), self.tail.flatten(0, 1))
        out, _ = attention.attend(attention.queries(q_resid), carry, None, pools, tile)
        return attention.project(out), pools

    def _complete_pools(self, indexer: Indexer, h: Tensor, tile: Tile) -> None:
        """Writes the keys of the pools that this token completes, and moves the tail on by it."""
        members = torch.cat([self.tail, indexer.keys_and_gates(h).unsqueeze(1)], dim=1)  # B kpool 2DI
        self.tail = members[:, 1:].clone()
        full = (tile.offsets % indexer.kpool == indexer.kpool - 1).nonzero()[:, 0]
        if len(full):
            self.pool_keys[full, tile.offsets[full] // indexer.kpool] = indexer.pool_keys(members[full])

    def keep(self, which: Tensor) -> None:
        self.latents, self.pool_keys, self.tail = self.latents[which], self.pool_keys[which], self.tail[which]

    def grow(self, slots: int) -> None:
        self.latents, self.pool_keys = (
            torch.cat([each, torch.zeros_like(each)], dim=1) for each in (self.latents, self.pool_keys)
        )
