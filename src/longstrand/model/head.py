"""The end of the trunk: final norm and head, from the mean over streams to the targets' log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.memory.tiles import Tile
from longstrand.ops.logprob import token_logprobs
from longstrand.ops.norm import rms_norm
from longstrand.ops.precision import wide_dtype


class LogprobEnd:
    """log softmax(rms_norm(mean) head^T)[target], tile by tile; neither hidden states nor logits of all tokens exist.

    Kept per token: the mean (D x e bytes) and the output (4). One tile is recomputed in backward.
    """

    reads_mean = True

    def __init__(
        self, scale: Float[Tensor, "D"], head: Float[Tensor, "W D"], targets: Int[Tensor, "T"], eps: float
    ) -> None:
        self._scale, self._head, self._targets, self._eps = scale, head, targets, eps

    def new_output(self, num_tokens: int) -> Float[Tensor, "T"]:
        """float32, or float64 for a float64 model; 0 where no tile of this rank writes."""
        return self._head.new_zeros(num_tokens, dtype=wide_dtype(self._head.dtype), requires_grad=False)

    def forward_tile(self, mean: Float[Tensor, "T D"], tile: Tile) -> Float[Tensor, "T"]:
        hidden = rms_norm(mean, self._scale, self._eps)
        return token_logprobs(hidden, self._head, self._targets[tile.positions])

    @torch.enable_grad()
    def backward_tile(
        self, mean: Float[Tensor, "T D"] | None, d_out: Float[Tensor, "T"], tile: Tile
    ) -> Float[Tensor, "T D"]:
        assert mean is not None
        leaf = mean.detach().requires_grad_()
        torch.autograd.backward(self.forward_tile(leaf, tile), d_out)
        assert leaf.grad is not None
        return leaf.grad

    def parameters(self) -> Iterator[Tensor]:
        return iter((self._scale, self._head))

    def trains(self) -> bool:
        return self._scale.requires_grad or self._head.requires_grad
