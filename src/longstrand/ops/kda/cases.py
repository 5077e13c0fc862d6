"""Inputs for KDA: lengths around the chunk, unequal widths, decays at both ends, document starts on and off borders."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOWER_BOUND = -5.0


@dataclass(frozen=True)
class KdaCase:
    """Sizes, the range of the log decay per token, and where documents start (beside the carry at 0)."""

    name: str
    length: int
    slowest: float = -1e-4
    fastest: float = LOWER_BOUND
    starts: tuple[int, ...] = ()
    batch: int = 1
    heads: int = 3
    key: int = 5
    value: int = 7


CASES = (
    *(KdaCase(f"{length} tokens", length) for length in (1, 2, 15, 16, 17, 31, 33, 64, 65, 130)),
    KdaCase("two rows", 37, batch=2),
    KdaCase("one head, one channel", 19, heads=1, key=1, value=3),
    KdaCase("slow decay", 83, slowest=0.0, fastest=-1e-3),
    KdaCase("fastest decay everywhere", 67, slowest=LOWER_BOUND, fastest=LOWER_BOUND),
    KdaCase("documents on and off chunk borders", 130, fastest=-1e-2, starts=(1, 3, 6, 16, 64, 65, 129)),
    KdaCase("a document at the first token", 35, fastest=-1e-2, starts=(0, 34)),
)


def draw(case: KdaCase, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of `kda` in float64; `first` is there only where documents start."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64)

    tokens = (case.length, case.heads)
    share = torch.rand(case.batch, *tokens, case.key, generator=generator, dtype=torch.float64)
    inputs = {
        "q": noise(*tokens, case.key),
        "k": noise(*tokens, case.key),
        "v": noise(*tokens, case.value),
        "g": case.slowest + share.square() * (case.fastest - case.slowest),
        "beta": noise(*tokens).sigmoid(),
        "state": noise(case.heads, case.key, case.value),
    }
    if case.starts:
        inputs["first"] = torch.zeros(case.batch, case.length, dtype=torch.bool)
        inputs["first"][:, list(case.starts)] = True
    return inputs
