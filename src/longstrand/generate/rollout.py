"""The loop of generation: prefill, draw, append, and what a sequence ends up with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.errors import CheckFailed, UserError
from longstrand.generate.sampling import Sampling, generator_for
from longstrand.memory import Levers
from longstrand.model import Model
from longstrand.model.decode import Decoding, Prefix, prefill

BATCH = 32
"""Sequences that grow together unless told otherwise."""

Watch = Callable[[str, int], None]
"""Told what was done: ("prompt" or "new", tokens)."""


@dataclass(frozen=True)
class Generated:
    """One sequence.

    Attributes:
        tokens: what was generated, the stop token included where one ended it.
        logprobs: the model's own natural log-probability of each: of all tokens, before temperature, top_k, top_p and
            allowed. They are what `Model.token_logprobs` gives for the same sequence, and what a ratio of
            probabilities needs.
        excluded: the probability that the model gave to tokens that were not allowed, as a mean over tokens.
        stopped: whether a stop token ended it.
    """

    tokens: Int[Tensor, "T"]
    logprobs: Float[Tensor, "T"]
    excluded: float
    stopped: bool


def generate(
    model: Model,
    prompts: Sequence[Int[Tensor, "T"]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    num_samples: int = 1,
    batch: int = BATCH,
    tile: int = Levers.tile,
    watch: Watch | None = None,
) -> list[Generated]:
    """Continues each prompt `num_samples` times.

    What a sequence draws depends on its prompt, the seed and its place (prompt p, sample s), not on the sequences
    beside it, beyond the rounding of matrix products of other sizes.

    Args:
        prompts: token ids, at least one each: the model has no token that begins a sequence.
        batch: sequences that grow together; longest prompts first, so that those of a batch are alike.
        tile: tokens of a prompt that are computed at once; changes speed and memory only.

    Returns: sample s of prompt p at p x num_samples + s.

    Raises:
        UserError: a prompt that is empty or has a token beyond the vocabulary, or a count below 1.
        CheckFailed: a log-probability that is not finite.
    """
    counts = {"max_new_tokens": max_new_tokens, "num_samples": num_samples, "batch": batch, "tile": tile}
    _check(model, prompts, sampling, counts)
    places = [_Place(p, s) for p in range(len(prompts)) for s in range(num_samples)]
    longest_first = iter(sorted(places, key=lambda place: -len(prompts[place.prompt])))
    found: dict[_Place, _Growing] = {}
    prefixes: dict[int, Prefix] = {}
    while together := list(islice(longest_first, batch)):
        for place in together:
            if place.prompt not in prefixes:
                prefixes[place.prompt] = prefill(model, prompts[place.prompt], tile)
                if watch is not None:
                    watch("prompt", len(prompts[place.prompt]))
        growing = [_Growing(place, generator_for(sampling.seed, *place)) for place in together]
        decoding = Decoding(model, [prefixes[p] for p, _ in together], room=min(max_new_tokens, 4096))
        last = together[-1]  # goes on in the next batch if samples of it are left
        prefixes = {last.prompt: prefixes[last.prompt]} if last.sample < num_samples - 1 else {}
        _grow(decoding, growing, max_new_tokens, sampling, watch)
        found |= {each.place: each for each in growing}
    return [found[place].done(sampling) for place in places]


class _Place(NamedTuple):
    prompt: int
    sample: int


@dataclass
class _Growing:
    """One sequence on its way: 16 bytes per token."""

    place: _Place
    generator: torch.Generator
    tokens: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    excluded: float = 0.0

    def uniform(self) -> Tensor:
        return torch.rand((), generator=self.generator, dtype=torch.float64)

    def stopped(self, sampling: Sampling) -> bool:
        return bool(self.tokens) and self.tokens[-1] in sampling.stop

    def done(self, sampling: Sampling) -> Generated:
        return Generated(
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float64),
            excluded=self.excluded / max(len(self.tokens), 1),
            stopped=self.stopped(sampling),
        )


@torch.no_grad()
def _grow(
    decoding: Decoding,
    growing: Sequence[_Growing],
    max_new_tokens: int,
    sampling: Sampling,
    watch: Watch | None,
) -> None:
    """Draws tokens until every sequence has stopped or is long enough."""
    for step in range(max_new_tokens):
        logprobs = decoding.logprobs()
        _check_finite(logprobs, growing, step)
        uniform = torch.stack([each.uniform() for each in growing]).to(logprobs.device)
        tokens = sampling.draw(logprobs, uniform)
        drawn = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        excluded = _excluded(logprobs, sampling)
        for each, token, logprob, share in zip(growing, tokens.tolist(), drawn, excluded, strict=True):
            each.tokens.append(token)
            each.logprobs.append(logprob)
            each.excluded += share
        if watch is not None:
            watch("new", len(growing))
        going = [row for row, each in enumerate(growing) if not each.stopped(sampling)]
        if not going or step == max_new_tokens - 1:
            return
        if len(going) < len(growing):
            rows = torch.tensor(going, device=tokens.device)
            decoding.keep(rows)
            tokens, growing = tokens[rows], [growing[row] for row in going]
        decoding.append(tokens)


def _excluded(logprobs: Tensor, sampling: Sampling) -> list[float]:
    """The probability of each row's tokens that may not be drawn."""
    if sampling.allowed is None:
        return [0.0] * len(logprobs)
    ids = torch.tensor(sampling.allowed, device=logprobs.device)
    return (-torch.expm1(logprobs[:, ids].logsumexp(-1))).clamp(min=0).tolist()


def _check_finite(logprobs: Tensor, growing: Sequence[_Growing], step: int) -> None:
    bad = torch.isnan(logprobs).any(dim=-1)
    if bool(bad.any()):
        place = growing[int(bad.nonzero()[0])].place
        raise CheckFailed(
            f"generation: the log-probabilities of prompt {place.prompt}, sample {place.sample} are not finite at new "
            f"token {step}; the weights or the precision are at fault"
        )


def _check(
    model: Model,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    counts: dict[str, int],
) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} = {value}: must be at least 1")
    if sampling.temperature == 0 and counts["num_samples"] > 1:
        raise UserError(
            f"num_samples = {counts['num_samples']}: at temperature 0 all samples of a prompt are the same; set it to 1"
        )
    vocabulary = model.architecture.vocab_size
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {number}: empty; a prompt needs at least one token")
        if not 0 <= int(prompt.min()) <= int(prompt.max()) < vocabulary:
            raise UserError(
                f"prompt {number}: holds tokens from {int(prompt.min())} to {int(prompt.max())}, and the model's "
                f"vocabulary has {vocabulary}"
            )
    for name in ("allowed", "stop"):
        for token in getattr(sampling, name) or ():
            if not 0 <= token < vocabulary:
                raise UserError(f"{name}: token {token} is beyond the model's vocabulary of {vocabulary}")
