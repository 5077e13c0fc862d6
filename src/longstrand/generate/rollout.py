"""The loop of generation: prefill, draw, append, and what a sequence ends up with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from longstrand.errors import CheckFailed, UserError
from longstrand.generate.sampling import Sampling, generator_for
from longstrand.generate.turns import Generated, Place, Turns
from longstrand.memory import Levers
from longstrand.model import Model
from longstrand.model.decode import Decoding, Prefix
from longstrand.parallel import said_once

BATCH = 32
"""Sequences that grow together unless told otherwise."""

Watch = Callable[[str, int], None]
"""Told what was done: ("prompt" or "new", tokens)."""


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
    with said_once(model.mesh.world, UserError):  # every rank is given the same
        _check(model, prompts, sampling, counts)
    turns = Turns(model)
    found: dict[Place, Generated] = {}
    prefixes: dict[int, Prefix] = {}
    with model.gathered():
        for together in turns.batches([len(prompt) for prompt in prompts], num_samples, batch):
            missing = {p: prompts[p] for p, _ in together if p not in prefixes}
            for tokens, prefix in turns.prefill(missing, tile):
                prefixes |= prefix
                if watch is not None:
                    watch("prompt", tokens)
            growing = [_Growing(place, generator_for(sampling.seed, *place)) for place in together]
            decoding, room = None, min(max_new_tokens, 4096)
            if together:
                decoding = Decoding(model, [prefixes[p] for p, _ in together], room)
                last = together[-1]  # goes on in the next batch if samples of it are left
                prefixes = {last.prompt: prefixes[last.prompt]} if last.sample < num_samples - 1 else {}
            _grow(turns, decoding, growing, max_new_tokens, sampling, watch)
            found |= {each.place: each.done(sampling) for each in growing}
    return turns.merge(found, [Place(p, s) for p in range(len(prompts)) for s in range(num_samples)])


@dataclass
class _Growing:
    """One sequence on its way: 16 bytes per token."""

    place: Place
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
    turns: Turns,
    decoding: Decoding | None,
    growing: Sequence[_Growing],
    max_new_tokens: int,
    sampling: Sampling,
    watch: Watch | None,
) -> None:
    """Draws tokens until every sequence, of every rank, has stopped or is long enough."""
    for step in range(max_new_tokens):
        tokens, error, drawn = None, None, len(growing)
        if decoding is not None:
            logprobs = decoding.logprobs()
            error = _not_finite(logprobs, growing, step)
            tokens = _draw(turns, logprobs, growing, sampling)
        going = [row for row, each in enumerate(growing) if not each.stopped(sampling)]
        drawn, more = turns.agree(drawn, len(going), error)
        if watch is not None:
            watch("new", drawn)
        if not more or step == max_new_tokens - 1:
            return
        if decoding is None or tokens is None or not going:
            decoding, growing = None, []
            turns.idle()
            continue
        if len(going) < len(growing):
            rows = torch.tensor(going, device=tokens.device)
            decoding.keep(rows)
            tokens, growing = tokens[rows], [growing[row] for row in going]
        decoding.append(tokens)


def _draw(turns: Turns, logprobs: Tensor, growing: Sequence[_Growing], sampling: Sampling) -> Tensor:
    """One more token of each sequence, with what is kept of it."""
    uniform = torch.stack([each.uniform() for each in growing]).to(logprobs.device)
    tokens = turns.drawn(sampling.draw(logprobs, uniform))
    drawn = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    excluded = _excluded(logprobs, sampling)
    for each, token, logprob, share in zip(growing, tokens.tolist(), drawn, excluded, strict=True):
        each.tokens.append(token)
        each.logprobs.append(logprob)
        each.excluded += share
    return tokens


def _excluded(logprobs: Tensor, sampling: Sampling) -> list[float]:
    """The probability of each row's tokens that may not be drawn."""
    if sampling.allowed is None:
        return [0.0] * len(logprobs)
    ids = torch.tensor(sampling.allowed, device=logprobs.device)
    return (-torch.expm1(logprobs[:, ids].logsumexp(-1))).clamp(min=0).tolist()


def _not_finite(logprobs: Tensor, growing: Sequence[_Growing], step: int) -> CheckFailed | None:
    bad = torch.isnan(logprobs).any(dim=-1)
    if not bool(bad.any()):
        return None
    place = growing[int(bad.nonzero()[0])].place
    return CheckFailed(
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
