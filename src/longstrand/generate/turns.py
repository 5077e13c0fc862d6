"""How the ranks of a mesh generate together: who grows which sequences, and what all of them do at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.errors import CheckFailed
from longstrand.model import Model
from longstrand.model.decode import Prefix, idle_step, prefill
from longstrand.parallel import together


class Place(NamedTuple):
    """Of one sequence."""

    prompt: int
    sample: int


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


class Turns:
    """The ranks of a model's mesh, of which each `data` rank grows its own sequences.

    Ranks of `context` share a prompt's way through the model and then grow the same sequences, every one of which the
    first of them draws: rounding may differ between them, their tokens may not. Weights are gathered and experts
    reached by all ranks at once, so that all take as many turns; one without a sequence takes part too (`idle`).
    """

    def __init__(self, model: Model) -> None:
        self.model, self.mesh = model, model.mesh

    def batches(self, lengths: Sequence[int], num_samples: int, size: int) -> Iterator[tuple[Place, ...]]:
        """This rank's sequences, longest prompts first; as many batches on every rank, the last ones maybe empty.

        Prompts are dealt in turn; their samples stay together unless there are fewer prompts than ranks.
        """
        data = self.mesh.data
        prompts = sorted(range(len(lengths)), key=lambda prompt: -lengths[prompt])
        places = [Place(prompt, sample) for prompt in prompts for sample in range(num_samples)]
        per_turn = num_samples if len(prompts) >= data.size else 1
        own = [each for at, each in enumerate(places) if at // per_turn % data.size == data.rank]
        batches = [tuple(own[at : at + size]) for at in range(0, len(own), size)]
        for turn in range(data.largest(len(batches))):
            yield batches[turn] if turn < len(batches) else ()

    def prefill(
        self, prompts: Mapping[int, Int[Tensor, "T"]], tile: int
    ) -> Iterator[tuple[int, dict[int, Prefix]]]:
        """A prompt of each rank at a time: tokens of all of them, and this one's prefix."""
        numbers = list(prompts)
        for turn in range(self.mesh.data.largest(len(numbers))):
            number = numbers[turn] if turn < len(numbers) else None
            prompt = torch.zeros(1, dtype=torch.int64) if number is None else prompts[number]
            prefix = prefill(self.model, prompt, tile)
            (length,) = self._totals(len(prompt) if number is not None else 0)
            yield length, {number: prefix} if number is not None else {}

    def drawn(self, tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
        """The tokens of the first rank that grows these sequences."""
        return self.mesh.context.share(tokens, 0, "drawn tokens")

    def agree(self, drawn: int, going: int, error: CheckFailed | None) -> tuple[int, bool]:
        """Tokens that all ranks have just drawn, and whether any of them goes on.

        Raises:
            CheckFailed: that of a rank that has one, on all.
        """
        all_drawn, all_going = self._totals(drawn, going)
        failed = self.mesh.world.largest(int(error is not None))
        with together(self.mesh.world) if failed else nullcontext():
            if error is not None:
                raise error
        return all_drawn, all_going > 0

    def idle(self) -> None:
        """While other ranks append a token."""
        idle_step(self.model)

    def merge(self, own: Mapping[Place, Generated], places: Sequence[Place]) -> list[Generated]:
        """The sequences of all ranks, on each of them, in the order of `places`."""
        mesh = self.mesh
        if mesh.world.size == 1:
            return [own[place] for place in places]
        mine = {at: own[each] for at, each in enumerate(places) if each in own and mesh.context.rank == 0}
        counts = torch.zeros(len(places), 2, dtype=torch.int64)
        shares = torch.zeros(len(places), dtype=torch.float64)
        for at, each in mine.items():
            counts[at, 0], counts[at, 1], shares[at] = len(each.tokens), each.stopped, each.excluded
        counts, shares = mesh.world.sum(counts), mesh.world.sum(shares)
        tokens = torch.zeros(len(places), int(counts[:, 0].max()), dtype=torch.int64)
        logprobs = torch.zeros(tokens.shape, dtype=torch.float64)
        for at, each in mine.items():
            tokens[at, : len(each.tokens)], logprobs[at, : len(each.tokens)] = each.tokens, each.logprobs
        tokens, logprobs = mesh.world.sum(tokens), mesh.world.sum(logprobs)
        return [
            Generated(ids[:length].clone(), values[:length].clone(), share, bool(stopped))
            for ids, values, share, (length, stopped) in zip(
                tokens, logprobs, shares.tolist(), counts.tolist(), strict=True
            )
        ]

    def _totals(self, *values: int) -> list[int]:
        """Each summed over the data ranks; ranks of `context` have the same."""
        return self.mesh.data.sum(torch.tensor(values, dtype=torch.int64)).tolist()
