"""What may run in place of what was asked, each of which can be put into the product: it runs, and says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.bench._faults import Context
from longstrand.memory.tiles import Tile
from longstrand.model import Model
from longstrand.model import load_model as load_any_model
from longstrand.model.dsa import Dsa, DsaCarry
from longstrand.model.kda import Kda, Rule
from longstrand.ops.native import Op
from longstrand.ops.precision import wide_dtype


def dense_attention_in(layer: int) -> Context:
    """A DSA layer attends to everything instead of its choice."""

    def attend(
        self: Dsa, q: Tensor, carry: DsaCarry, d_latents: Tensor | None, pools: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = self.attend_dense(q, carry.latents, tile).out
        return out + 0 * q, q.new_zeros(pools.shape, dtype=wide_dtype(q.dtype))

    return _method_of(layer, "attend", attend)


def default_pool_size() -> Context:
    """The model is made with the pool size that transformers defaults to, whatever config.json says."""
    own = Architecture.from_hf

    def from_hf(cls: type, config: dict[str, Any], where: str = "config") -> Architecture:
        return own({**config, "index_kpool": 16}, where)

    return patch.object(Architecture, "from_hf", classmethod(from_hf))


def padded_heads_in(layer: int) -> Context:
    """A KDA layer pads its heads to twice their width, as for a kernel that takes no other; the result is the same."""

    def recur(self: Kda, rule: Rule, tile: Tile, state: Tensor) -> tuple[Tensor, Tensor]:
        width = self.head_dim
        q, k, v, g = (F.pad(each, (0, width)) for each in rule[:4])
        out, last = Kda.recur(self, (q, k, v, g, rule[4]), tile, F.pad(state, (0, width, 0, width)))
        return out[..., :width] * 2**0.5, last[..., :width, :width]

    return _method_of(layer, "recur", recur)


def decay_in_bfloat16_in(layer: int) -> Context:
    """A tensor that is kept in float32 is rounded with the others."""

    def change(model: Model) -> None:
        rate = model.get_parameter(f"layers.{layer}.self_attn.A_log")
        rate.data = rate.data.bfloat16()

    return _changed(change)


@contextmanager
def refused(op: Op, reason: str, *, from_tokens: int = 1) -> Iterator[None]:
    """The op's kernel does not take as many tokens; the plan asks about one, so that with 2 it does not know."""
    own = op.refusal

    def refusal(**inputs: Any) -> str | None:
        first = next(iter(inputs.values()))
        return own(**inputs) or (reason if first.shape[1] >= from_tokens else None)

    object.__setattr__(op, "refusal", refusal)
    try:
        yield
    finally:
        object.__setattr__(op, "refusal", own)


def _method_of(layer: int, name: str, method: Callable[..., Any]) -> Context:
    def change(model: Model) -> None:
        attention: Any = model.get_submodule(f"layers.{layer}.self_attn")
        setattr(attention, name, MethodType(method, attention))

    return _changed(change)


def _changed(change: Callable[[Model], None]) -> Context:
    """Every model that training loads is changed."""

    def load_model(*arguments: Any, **options: Any) -> Model:
        model = load_any_model(*arguments, **options)
        change(model)
        return model

    return patch("longstrand.train.sft.load_model", load_model)
