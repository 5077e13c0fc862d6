"""Inputs for the hyper-connections: odd sizes, other numbers of streams, saturated gates, a tiny stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MhcCase:
    """`spread` is that of the gates' logits; `size` that of the streams."""

    name: str
    length: int = 7
    streams: int = 4
    width: int = 5
    iterations: int = 20
    spread: float = 1.0
    size: float = 1.0
    norm_eps: float = 1e-5


CASES = (
    MhcCase("one token", length=1),
    MhcCase("odd sizes", length=13, width=9),
    MhcCase("two streams", streams=2, iterations=7),
    MhcCase("one stream", streams=1),
    MhcCase("one iteration", iterations=1),
    MhcCase("nearly a permutation", spread=6.0),
    MhcCase("a permutation", spread=60.0),
    MhcCase("streams as small as the epsilon", size=3e-3),
)


def draw(case: MhcCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensor arguments of `mhc_gather` in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    streams, outputs = case.streams, case.streams * (2 + case.streams)
    return {
        "x": case.size * noise(case.length, streams, case.width),
        "fn": noise(outputs, streams * case.width) * (streams * case.width) ** -0.5,
        "base": case.spread * noise(outputs),
        "scale": 1 + 0.3 * noise(3),
    }


def settings(case: MhcCase) -> dict[str, float]:
    """The other arguments of `mhc_gather`."""
    return {"norm_eps": case.norm_eps, "eps": 1e-6, "iterations": case.iterations}
