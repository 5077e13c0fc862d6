"""Inputs for the experts: experts without tokens, one token, gates and ups beyond the clamp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertsCase:
    """`only` lists the experts that may be chosen."""

    name: str
    length: int = 23
    num_experts: int = 6
    active: int = 2
    width: int = 5
    inner: int = 7
    only: tuple[int, ...] | None = None
    limit: float = 10.0


CASES = (
    ExpertsCase("spread"),
    ExpertsCase("one token", length=1),
    ExpertsCase("all tokens to one expert", active=1, only=(0,)),
    ExpertsCase("two of many experts", num_experts=17, only=(3, 16)),
    ExpertsCase("clamped", limit=0.4),
    ExpertsCase("every expert active", length=5, num_experts=3, active=3),
)


def draw(case: ExpertsCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensor arguments of `experts` in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    allowed = torch.tensor(case.only or range(case.num_experts))
    order = torch.rand(case.length, len(allowed), generator=generator).argsort(-1)
    return {
        "x": noise(case.length, case.width),
        "ids": allowed[order[:, : case.active]],
        "weights": noise(case.length, case.active).sigmoid(),
        "gate_up": noise(case.num_experts, 2 * case.inner, case.width),
        "down": noise(case.num_experts, case.width, case.inner),
    }
