"""Definitions that can be put in the product's place, each of which can be made wrong in one point.

Every function here takes `wrong` and returns a context in which the product runs with the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import longstrand.model.dsa
import longstrand.model.dsa_layer
import longstrand.model.ffn
import longstrand.model.indexer
import longstrand.model.kda
import longstrand.model.kda_layer
import longstrand.model.layer
import longstrand.model.model
import longstrand.ops.experts.grouped
from longstrand.architecture import Architecture
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.model.ffn import Router
from longstrand.model.indexer import Indexer
from longstrand.model.kda import Kda
from longstrand.model.layer import Layer
from longstrand.ops.select import select_pools_reference

Context = AbstractContextManager[Any]


def kpool(wrong: bool) -> Context:
    """The config's pool size, or that of transformers' class (16)."""
    return _read_config(lambda config: config | ({"index_kpool": 16, "index_topk": 16} if wrong else {}))


def dense_layers(wrong: bool) -> Context:
    """A config that is silent has three dense layers, or one."""
    layers = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"]}
    return _read_config(lambda config: config | (layers if wrong else {}))


def gate(wrong: bool) -> Context:
    """Log decay as a scaled sigmoid, or as the older gate cut at the bound."""

    def log_decay(self: Kda, h: Tensor) -> Tensor:
        raw = self.f_b_proj(self.f_a_proj(h)) + self.dt_bias
        raw = raw.unflatten(-1, (self.heads, self.head_dim))
        rate = self.A_log.exp()[:, None]
        if wrong:
            return (-rate * F.softplus(raw)).clamp(min=self.lower_bound)
        return self.lower_bound * torch.sigmoid(rate * raw)

    return patch.object(Kda, "log_decay", log_decay)


def clamp_after_silu(wrong: bool) -> Context:
    def swiglu(both: Tensor, limit: float) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        active = F.silu(gate).clamp(max=limit) if wrong else F.silu(gate.clamp(max=limit))
        return active * up.clamp(-limit, limit)

    return _swiglu(swiglu)


def gate_minimum(wrong: bool) -> Context:
    def swiglu(both: Tensor, limit: float) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate.clamp(-limit if wrong else None, limit)) * up.clamp(-limit, limit)

    return _swiglu(swiglu)


def mhc_norm(wrong: bool) -> Context:
    """The epsilon inside the root, or added to it."""

    def norm(flat: Tensor, eps: float) -> Tensor:
        square = flat.square().mean(-1, keepdim=True)
        return flat / (square.sqrt() + eps) if wrong else flat * torch.rsqrt(square + eps)

    return _mhc(norm=norm)


def sinkhorn_order(wrong: bool) -> Context:
    """Columns first, or rows first."""
    return _mhc(first_dim=-1 if wrong else -2)


def comb_transposed(wrong: bool) -> Context:
    def update(x: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return post.unsqueeze(-1) * out.unsqueeze(1) + (comb if wrong else comb.mT) @ x

    context = ExitStack()
    for module in (longstrand.model.layer, longstrand.model.kda_layer, longstrand.model.dsa_layer):
        context.enter_context(patch.object(module, "mhc_update", update))
    return context


def stream_head(wrong: bool) -> Context:
    """The mean of the streams, or a weighted one."""
    share = torch.tensor([0.4, 0.3, 0.2, 0.1] if wrong else [0.25] * 4, dtype=torch.float64)

    own = Layer.forward_tile

    def forward_tile(self: Any, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        y, carry = own(self, *args, **options)
        return (y * 4 * share[:, None] if hasattr(self, "is_last") else y), carry

    return patch.object(Layer, "forward_tile", forward_tile)


def crossing_pools(wrong: bool) -> Context:
    """Pools aligned to their document, or to the pack."""
    own_tile, own_pools = PackLayout.tile, Indexer.complete_pools

    def tile(self: PackLayout, start: int, stop: int, index: int = 0) -> Tile:
        found = own_tile(self, start, stop, index)
        if not wrong:
            return found
        position = torch.arange(start, stop)
        first = (position - found.offsets) // self.kpool
        return replace(
            found, slots=position, first_pool=first, num_visible=(position + 1) // self.kpool - first
        )

    def complete_pools(self: Indexer, h: Tensor, tile: Tile, tail: Tensor) -> Any:
        return own_pools(self, h, replace(tile, offsets=tile.slots) if wrong else tile, tail)

    context = ExitStack()
    context.enter_context(patch.object(PackLayout, "tile", tile))
    context.enter_context(patch.object(Indexer, "complete_pools", complete_pools))
    return context


def early_pools(wrong: bool) -> Context:
    """A pool counts as visible with its last token, or with its first."""
    own = PackLayout.tile

    def tile(self: PackLayout, start: int, stop: int, index: int = 0) -> Tile:
        found = own(self, start, stop, index)
        seen = found.offsets + (self.kpool if wrong else 1)
        return replace(found, num_visible=seen // self.kpool)

    return patch.object(PackLayout, "tile", tile)


def no_tail(wrong: bool) -> Context:
    """The own open pool is attended to, or only where nothing else is."""

    def visible(pools: list[int], slot: int, kpool: int) -> list[int]:
        chosen = [pool * kpool + inside for pool in pools if pool >= 0 for inside in range(kpool)]
        tail = range(slot - slot % kpool, slot + 1) if slot % kpool != kpool - 1 else range(0)
        return chosen if wrong and chosen else [*chosen, *tail]

    return _attention(visible)


def clamped_ids(wrong: bool) -> Context:
    """-1 is no pool, or pool 0."""

    def visible(pools: list[int], slot: int, kpool: int) -> list[int]:
        pools = [max(pool, 0) for pool in pools] if wrong else [pool for pool in pools if pool >= 0]
        tail = range(slot - slot % kpool, slot + 1) if slot % kpool != kpool - 1 else range(0)
        return [*(pool * kpool + inside for pool in pools for inside in range(kpool)), *tail]

    return _attention(visible)


def one_document(wrong: bool) -> Context:
    """Starts are read, or only the first and the last."""

    def layout(starts: Tensor, *args: Any) -> PackLayout:
        return PackLayout(starts[[0, -1]] if wrong else starts, *args)

    return patch.object(longstrand.model.model, "PackLayout", layout)


def normalise(wrong: bool) -> Context:
    """x / sqrt(sum x^2 + 1e-6), or x / max(norm, 1e-6)."""

    def unit(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=1e-6) if wrong else x / torch.sqrt(x.square().sum(-1, True) + 1e-6)

    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, outputs = unit(q) * q.shape[-1] ** -0.5, unit(k), []
        for t in range(q.shape[1]):
            if first is not None:
                state = state * ~first[:, t, None, None, None]
            state = state * g[:, t, :, :, None].exp()
            error = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
            state = state + (beta[:, t, :, None] * k[:, t]).unsqueeze(-1) * error.unsqueeze(-2)
            outputs.append((state * q[:, t, :, :, None]).sum(-2))
        return torch.stack(outputs, dim=1), state

    return patch.object(longstrand.model.kda, "kda", recurrence)


def biased_weights(wrong: bool) -> Context:
    """The correction bias chooses experts, or also weighs them."""

    def weigh(self: Router, logits: Tensor, ids: Tensor) -> Tensor:
        scores = logits.sigmoid() + (self.e_score_correction_bias if wrong else 0)
        chosen = scores.gather(-1, ids)
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.factor

    return patch.object(Router, "weigh", weigh)


def zigzag(wrong: bool) -> Context:
    """Tiles from left to right, or dealt from both ends as for balanced ranks."""
    own = PackLayout.tiles

    def tiles(self: PackLayout, size: int) -> list[Tile]:
        found = list(own(self, size))
        return [found[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(len(found))] if wrong else found

    return patch.object(PackLayout, "tiles", tiles)


def row_offset(wrong: bool) -> Context:
    """A block of rows sees what its own rows see, or what the first rows see."""

    def select(
        q: Tensor, weights: Tensor, keys: Tensor, first_pool: Tensor, num_visible: Tensor, num_selected: int
    ) -> Tensor:
        chosen = []
        for start in range(0, len(q), 16):
            rows = slice(start, start + 16)
            seen = num_visible[: len(q[rows])] if wrong else num_visible[rows]
            chosen.append(
                select_pools_reference(q[rows], weights[rows], keys, first_pool[rows], seen, num_selected)
            )
        return torch.cat(chosen)

    return patch.object(longstrand.model.indexer, "select_pools", select)


def doubling(wrong: bool) -> Context:
    """A chunk's (I + L)^-1 by a triangular solve, or as the product of I + (-L)^(2^i)."""

    def invert(lower: Tensor) -> Tensor:
        unit = torch.eye(lower.shape[-1], dtype=lower.dtype)
        if not wrong:
            return torch.linalg.solve_triangular(
                unit + lower, unit.expand_as(lower), upper=False, unitriangular=True
            )
        power, inverse = -lower, unit - lower
        for _ in range(6):
            power = power @ power
            inverse = inverse + inverse @ power
        return inverse

    def chunk(pieces: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """One chunk of one batch row, heads first: [H, C, K]; slow decay, so plain differences are safe."""
        q, k, v, g, beta = pieces
        total = g.cumsum(1)
        decay = (total.unsqueeze(2) - total.unsqueeze(1)).clamp(max=0).exp()  # H C C K
        lower = (torch.einsum("hik,hjk,hijk->hij", k, k, decay) * beta.unsqueeze(-1)).tril(-1)
        values = invert(lower) @ (beta.unsqueeze(-1) * (v - (k * total.exp()) @ state))
        scores = torch.einsum("hik,hjk,hijk->hij", q, k, decay).tril()
        out = (q * total.exp()) @ state + scores @ values
        rest = (total[:, -1:] - total).exp()
        return out, state * total[:, -1].exp().unsqueeze(-1) + (k * rest).mT @ values

    def chunks(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k = (x / torch.sqrt(x.square().sum(-1, True) + 1e-6) for x in (q, k))
        inputs = (q * q.shape[-1] ** -0.5, k, v, g, beta)
        last, outputs = state[0], []
        for pieces in zip(*(x[0].transpose(0, 1).split(64, dim=1) for x in inputs), strict=True):
            out, last = chunk(pieces, last)
            outputs.append(out)
        return torch.cat(outputs, dim=1).transpose(0, 1)[None], last[None]

    return patch.object(longstrand.model.kda, "kda", chunks)


def _read_config(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Context:
    own = Architecture.from_hf

    def from_hf(config: dict[str, Any], where: str = "config") -> Architecture:
        return own(change(dict(config)), where)

    return patch.object(Architecture, "from_hf", from_hf)


def _swiglu(swiglu: Callable[[Tensor, float], Tensor]) -> Context:
    context = ExitStack()
    for module in (longstrand.model.ffn, longstrand.ops.experts.grouped):
        context.enter_context(patch.object(module, "swiglu", swiglu))
    return context


def _mhc(
    norm: Callable[[Tensor, float], Tensor] = lambda x, eps: x * torch.rsqrt(x.square().mean(-1, True) + eps),
    first_dim: int = -2,
) -> Context:
    """The hyper-connection's formulas with this norm, normalising over `first_dim` first (-2: columns)."""

    def gather(
        x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, eps: float, iterations: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        streams = x.shape[1]
        parts = [streams, streams, streams * streams]
        logits = (norm(x.flatten(1), norm_eps) @ fn.T).split(parts, dim=-1)
        pre, post, comb = (part * s + b for part, s, b in zip(logits, scale, base.split(parts), strict=True))
        comb = comb.unflatten(-1, (streams, streams)).softmax(-1) + eps
        for i in range(2 * iterations - 1):
            comb = comb / (comb.sum(first_dim if i % 2 == 0 else -3 - first_dim, keepdim=True) + eps)
        return ((pre.sigmoid() + eps).unsqueeze(-1) * x).sum(1), 2 * post.sigmoid(), comb

    return patch.object(longstrand.model.layer, "mhc_gather", gather)


def _attention(visible: Callable[[list[int], int, int], list[int]]) -> Context:
    """Attention of each row to the tokens that `visible` lists for it."""

    def attention(
        q: Tensor,
        latents: Tensor,
        d_latents: Tensor | None,
        pools: Tensor,
        slots: Tensor,
        *,
        kpool: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        rows = []
        for t, chosen in enumerate(pools.tolist()):
            seen = latents[visible(chosen, int(slots[t]), kpool)]
            rows.append(torch.softmax(scale * q[t] @ seen.T, dim=-1) @ seen)
        return torch.stack(rows), q.new_zeros(pools.shape)

    return patch.object(longstrand.model.dsa, "sparse_attention", attention)
