"""Inputs for the log-probability head: ignored targets at block borders, large logits, one token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogprobCase:
    """`ignored` lists the rows without a target; `size` is that of the logits."""

    name: str
    length: int = 10
    vocabulary: int = 7
    width: int = 5
    ignored: tuple[int, ...] = ()
    size: float = 1.0


CASES = (
    LogprobCase("every row has a target"),
    LogprobCase("one token", length=1),
    LogprobCase("the last rows ignored", ignored=(2, 7, 8, 9)),
    LogprobCase("no row has a target", ignored=tuple(range(10))),
    LogprobCase("large logits", length=33, vocabulary=65, ignored=(32,), size=80.0),
    LogprobCase("a vocabulary of one", vocabulary=1),
)


def draw(case: LogprobCase, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of `token_logprobs` in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(case.vocabulary, (case.length,), generator=generator)
    targets[list(case.ignored)] = -1
    return {
        "hidden": case.size * noise(case.length, case.width),
        "weight": noise(case.vocabulary, case.width) * case.width**-0.5,
        "targets": targets,
    }
