"""Inputs for the short convolution: pieces shorter than the window, documents shorter than it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ConvCase:
    """Lengths of the documents, the first of which began `before` tokens earlier."""

    name: str
    lengths: tuple[int, ...]
    before: int = 9
    batch: int = 1
    channels: int = 6
    taps: int = 4


CASES = (
    *(ConvCase(f"{length} tokens", (length,)) for length in (1, 2, 3, 4, 5, 23)),
    ConvCase("from nothing", (11,), before=0),
    ConvCase("two tokens before", (7,), before=2),
    ConvCase("short documents", (1, 2, 3, 1, 4, 5, 1), before=1),
    ConvCase("three taps, two rows", (5, 9), batch=2, taps=3),
    ConvCase("one tap", (4, 3), taps=1),
)


def draw(case: ConvCase, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of `short_conv` in float64; the tail is zero before a document's first token."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tail = noise(case.batch, case.taps - 1, case.channels)
    tail[:, : max(case.taps - 1 - case.before, 0)] = 0
    offsets = [torch.arange(case.before, case.before + case.lengths[0])]
    offsets += [torch.arange(length) for length in case.lengths[1:]]
    return {
        "x": noise(case.batch, sum(case.lengths), case.channels),
        "weight": noise(case.channels, case.taps),
        "tail": tail,
        "offsets": torch.cat(offsets),
    }
