"""Log-probabilities of targets, a block of tokens and of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.native import Op
from longstrand.ops.precision import wide, wide_dtype

TOKEN_BLOCK = 1024
VOCABULARY_BLOCK = 16384
LOGPROBS = Op("token_logprobs", "chunked")


def token_logprobs(
    hidden: Float[Tensor, "T D"], weight: Float[Tensor, "W D"], targets: Int[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """log softmax(hidden weight^T)[target] in nats, 0 where the target is negative; float32 or wider.

    The result does not depend on the block sizes beyond rounding. Transients: TOKEN_BLOCK x VOCABULARY_BLOCK values,
    and one float32 gradient of the weight.
    """
    LOGPROBS.in_kernel(hidden=hidden, weight=weight)
    return _TokenLogprobs.apply(hidden, weight, targets)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        normaliser = hidden.new_empty(len(hidden), dtype=wide_dtype(hidden.dtype))
        picked = torch.zeros_like(normaliser)
        for rows in _slices(len(hidden), TOKEN_BLOCK):
            parts = []
            for words in _slices(len(weight), VOCABULARY_BLOCK):
                logits = wide(hidden[rows] @ weight[words].T)
                parts.append(logits.logsumexp(-1))
                inside, column = _columns(targets[rows], words)
                picked[rows] += logits.gather(-1, column)[:, 0] * inside
            normaliser[rows] = torch.stack(parts).logsumexp(0)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        return (picked - normaliser).masked_fill(targets < 0, 0)

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight, dtype=wide_dtype(weight.dtype))
        d_logprobs = d_logprobs.masked_fill(targets < 0, 0)
        for rows in _slices(len(hidden), TOKEN_BLOCK):
            d_block = torch.zeros_like(hidden[rows], dtype=normaliser.dtype)
            for words in _slices(len(weight), VOCABULARY_BLOCK):
                logits = wide(hidden[rows] @ weight[words].T)
                d_logits = logits.sub_(normaliser[rows, None]).exp_().mul_(-d_logprobs[rows, None])
                inside, column = _columns(targets[rows], words)
                d_logits.scatter_add_(-1, column, (d_logprobs[rows] * inside)[:, None])
                d_logits = d_logits.to(hidden.dtype)
                if d_hidden is not None:
                    d_block += d_logits @ weight[words]
                if d_weight is not None:
                    d_weight[words] += d_logits.T @ hidden[rows]
            if d_hidden is not None:
                d_hidden[rows] = d_block
        return d_hidden, d_weight, None


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _columns(targets: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in this part of the vocabulary, and their columns (0 where they do not)."""
    inside = (targets >= words.start) & (targets < words.stop)
    return inside, (targets - words.start).masked_fill(~inside, 0)[:, None]
