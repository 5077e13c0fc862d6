"""What each layer of a model gives to its ops: shapes and dtypes, from the model's config alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from longstrand.architecture import KDA as KDA_LAYER
from longstrand.architecture import Architecture
from longstrand.ops import padding
from longstrand.ops.dense_attention import DENSE
from longstrand.ops.experts import EXPERTS
from longstrand.ops.indexer_loss import DENSE_LOSS, SELECTED_LOSS
from longstrand.ops.kda import KDA, LOG_DECAY
from longstrand.ops.logprob import LOGPROBS
from longstrand.ops.mhc import GATHER, UPDATE
from longstrand.ops.native import Op, name_of
from longstrand.ops.norm import GATED_NORM, NORM
from longstrand.ops.padding import NONE, Padding, Tiles
from longstrand.ops.precision import wide_dtype
from longstrand.ops.select import SELECT
from longstrand.ops.short_conv import SHORT_CONV
from longstrand.ops.sparse_attention import SPARSE
from longstrand.ops.swiglu import SWIGLU

Size = int | tuple[int, ...] | None
"""Of a dim: a number, one of several, or any, such as that of the tokens."""


@dataclass(frozen=True)
class Wanted:
    """A tensor that an op is given: its shape and its dtype (None: any)."""

    shape: tuple[Size, ...]
    dtype: torch.dtype | None = None

    def empty(self, device: str) -> Tensor:
        """One like it, without memory."""
        sizes = [size[0] if isinstance(size, tuple) else size or 1 for size in self.shape]
        return torch.empty((), dtype=self.dtype or torch.int64, device=device).expand(sizes)

    def __str__(self) -> str:
        sizes = (
            "any" if e is None else " or ".join(map(str, e if isinstance(e, tuple) else [e]))
            for e in self.shape
        )
        return f"{name_of(self.dtype) if self.dtype else 'any dtype'} [{', '.join(sizes)}]"

    def fits(self, tensor: Tensor) -> bool:
        return self._fits_shape(tuple(tensor.shape)) and self.dtype in (None, tensor.dtype)

    def _fits_shape(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and all(
            found in wanted if isinstance(wanted, tuple) else wanted in (None, found)
            for wanted, found in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class Call:
    """A call of an op: what it is given by name, and what a form (native or not) of it pads."""

    op: Op
    inputs: Mapping[str, Wanted | int]
    padding: Callable[..., Padding] = lambda native: NONE


@dataclass(frozen=True)
class Pass:
    """The training pass that is asked about.

    Attributes:
        tiles: of one document, or of this rank's parts of it.
        indexer: how it learns; see `SideLosses`.
    """

    dtype: torch.dtype
    tiles: Tiles
    indexer: Literal["frozen", "sparse", "warmup"] = "frozen"
    device: str = "cpu"

    @property
    def wide(self) -> torch.dtype:
        return wide_dtype(self.dtype)


def layer_calls(shape: Architecture, index: int, of: Pass) -> Iterator[Call]:
    """The ops of a layer, in the order of its forward pass; each once."""
    x, wide, D, R = of.dtype, of.wide, shape.hidden_size, shape.hc_mult
    gates = R * (2 + R)
    yield Call(
        GATHER,
        {
            "x": Wanted((None, R, D), x),
            "iterations": shape.hc_sinkhorn_iters,
            "fn": Wanted((gates, R * D), wide),
            "base": Wanted((gates,), wide),
            "scale": Wanted((3,), wide),
        },
        partial(padding.of_tokens_in_lanes, of.tiles),
    )
    kda = shape.layer_types[index] == KDA_LAYER
    yield _norm((D,) if kda else (D, shape.q_lora_rank, shape.kv_lora_rank), x)
    yield from _kda_calls(shape, of) if kda else _dsa_calls(shape, index, of)
    yield Call(
        UPDATE,
        {
            "x": Wanted((None, R, D), x),
            "out": Wanted((None, D), x),
            "post": Wanted((None, R), wide),
            "comb": Wanted((None, R, R), wide),
        },
        partial(padding.of_rows, [D]),
    )
    yield from _feed_forward_calls(shape, of, experts=shape.mlp_layer_types[index] == "sparse")


def head_calls(shape: Architecture, of: Pass) -> Iterator[Call]:
    """What comes after the last layer."""
    D = shape.hidden_size
    yield _norm((D,), of.dtype)
    head = {"hidden": Wanted((None, D), of.dtype), "weight": Wanted((shape.vocab_size, D), of.dtype)}
    yield Call(LOGPROBS, head)


def _norm(widths: tuple[int, ...], x: torch.dtype) -> Call:
    given = {"x": Wanted((None, widths), x), "weight": Wanted((widths,), x)}
    return Call(NORM, given, partial(padding.of_rows, widths))


def _kda_calls(shape: Architecture, of: Pass) -> Iterator[Call]:
    x, wide, tiles = of.dtype, of.wide, of.tiles
    H, K, J = shape.linear_num_heads, shape.linear_head_dim, shape.linear_conv_kernel_dim
    C = 3 * H * K
    conv = {
        "x": Wanted((1, None, C), x),
        "weight": Wanted((C, J), wide),
        "tail": Wanted((1, J - 1, C), x),
    }
    yield Call(SHORT_CONV, conv, partial(padding.of_rows, [C]))
    decay = {"raw": Wanted((None, H, K), x), "a_log": Wanted((H,), wide), "bias": Wanted((H * K,), wide)}
    yield Call(LOG_DECAY, decay, partial(padding.of_rows, [K]))
    rule = {
        **{name: Wanted((1, None, H, K), x) for name in "qkv"},
        "g": Wanted((1, None, H, K), wide),
        "beta": Wanted((1, None, H), wide),
        "state": Wanted((1, H, K, K), wide),
    }
    yield Call(KDA, rule, partial(padding.of_chunks, tiles, [K, K]))
    gated = {"x": Wanted((None, H, K), wide), "gate": Wanted((None, H, K), x), "weight": Wanted((K,), x)}
    yield Call(GATED_NORM, gated, partial(padding.of_rows, [K]))


def _dsa_calls(shape: Architecture, index: int, of: Pass) -> Iterator[Call]:
    x, wide, tiles = of.dtype, of.wide, of.tiles
    H, L, DI, kpool = shape.num_attention_heads, shape.kv_lora_rank, shape.index_head_dim, shape.index_kpool
    chosen = shape.index_topk // kpool
    attended = {"q": Wanted((None, H, L), x), "latents": Wanted((None, L), x)}
    scored: dict[str, Wanted | int] = {
        "q": Wanted((None, shape.index_n_heads, DI), wide),
        "weights": Wanted((None, shape.index_n_heads), wide),
        "keys": Wanted((None, DI), x),
    }
    learned = scored | {"d_keys": Wanted((None, DI), wide)}
    has_indexer = shape.indexer_types[index] == "full"
    if of.indexer == "warmup":
        yield Call(DENSE, {**attended, "kpool": kpool})
        if has_indexer:
            yield Call(DENSE_LOSS, learned)
        return
    if has_indexer:
        scores = partial(padding.of_scores, tiles, kpool=kpool, num_selected=chosen)
        yield Call(SELECT, scored | {"num_selected": chosen}, scores)
    pools = Wanted((None, chosen), torch.int32)
    yield Call(
        SPARSE,
        {**attended, "d_latents": Wanted((None, L), wide), "pools": pools, "kpool": kpool},
        partial(padding.of_selected, tiles, kpool=kpool, num_selected=chosen, width=L),
    )
    if has_indexer and of.indexer == "sparse":
        slots = padding.of_slots(tiles, kpool=kpool, num_selected=chosen)
        yield Call(SELECTED_LOSS, learned | {"pools": pools}, lambda native: slots)


def _feed_forward_calls(shape: Architecture, of: Pass, *, experts: bool) -> Iterator[Call]:
    x, D, E, F = of.dtype, shape.hidden_size, shape.n_routed_experts, shape.moe_intermediate_size
    widths: tuple[int, ...] = (shape.intermediate_size,)
    if experts:
        A, widths = shape.num_experts_per_tok, (F, F * shape.n_shared_experts)
        routed = {
            "x": Wanted((None, D), x),
            "ids": Wanted((None, A)),
            "weights": Wanted((None, A), of.wide),
            "gate_up": Wanted((E, 2 * F, D), x),
            "down": Wanted((E, D, F), x),
        }
        filled = partial(padding.of_experts, of.tiles, experts=E, active=A, dtype=x)
        yield Call(EXPERTS, routed, filled)
    both = Wanted((None, tuple(2 * width for width in widths)), x)
    yield Call(SWIGLU, {"both": both}, partial(padding.of_rows, widths))
