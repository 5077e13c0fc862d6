"""How the next token is drawn from the model's probabilities."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Applied in this order: allowed, temperature, top_k, top_p.

    Attributes:
        temperature: divides the log-probabilities; 0 takes the most likely token (of equal ones the lowest id).
        top_k: only the k most likely tokens; None: all.
        top_p: only the smallest set of most likely tokens whose probability reaches top_p; 1: all.
        seed: with the places of prompt and sample it fixes what a sequence draws, whatever stands beside it.
        allowed: token ids that may be drawn; None: all.
        stop: token ids after which a sequence ends.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    allowed: tuple[int, ...] | None = None
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature = {self.temperature:g}: must be 0 (the most likely token) or above, and finite; 1 draws "
                "from the model's own probabilities"
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p != 1):
            raise UserError(
                "temperature = 0: takes the most likely token, so that top_k and top_p would do nothing; remove them"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k = {self.top_k}: must be at least 1 token; leave it out to draw from all")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p:g}: must be above 0 and at most 1; 1 draws from all tokens")
        if self.allowed is not None and not self.allowed:
            raise UserError("allowed = (): no token could be drawn; name at least one, or None for all")

    def draw(self, logprobs: Float[Tensor, "B W"], uniform: Float[Tensor, "B"]) -> Int[Tensor, "B"]:
        """One token per row: inverts the cumulated probabilities at numbers from [0, 1).

        Transients: a few times B x W values in float64; rows are sorted only for top_p below 1.
        """
        ids = None if self.allowed is None else torch.tensor(self.allowed, device=logprobs.device)
        values = logprobs if ids is None else logprobs[:, ids]
        column = self._column(values, uniform)
        return column if ids is None else ids[column]

    def _column(self, logprobs: Tensor, uniform: Tensor) -> Tensor:
        if self.temperature == 0:
            return logprobs.argmax(dim=-1)
        values, order = logprobs.double(), None
        # 0 at the largest: none overflows.
        values = (values - values.amax(dim=-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < values.shape[1]:
            values, order = values.topk(self.top_k, dim=-1)
        elif self.top_p < 1:
            values, order = values.sort(dim=-1, descending=True, stable=True)
        shares = values.softmax(dim=-1)
        if self.top_p < 1:
            before = shares.cumsum(dim=-1) - shares
            shares = shares.masked_fill(before >= self.top_p, 0)
        total = shares.cumsum(dim=-1)
        whole = total[:, -1:]
        passed = (total <= uniform[:, None] * whole) & (total < whole)  # never a token without probability
        column = passed.sum(dim=-1)
        return column if order is None else order.gather(-1, column[:, None])[:, 0]


def generator_for(seed: int, prompt: int, sample: int) -> torch.Generator:
    """The random numbers of one sequence, from its own place alone."""
    digest = hashlib.blake2b(f"{seed} {prompt} {sample}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
