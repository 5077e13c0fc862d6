"""The repeats figure: KDA on keys that repeat, where a chunk's inverse by powers explodes, against the recurrence.

Every case is float32 against `kda_reference` in float64: outputs, last state and the gradients of all inputs, as
norms of differences over norms, per case. The decay's gradient is taken at the gate's input x, g = -5 sigmoid(x).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstrand.bench._arguments import command_line, parsed_length
from longstrand.bench.figures import show
from longstrand.ops.kda import kda, kda_reference

LIMIT = 1e-4
LENGTHS = (64, 65, 4096)
BETAS = (0.3, 0.9, 0.99, 1.0)
PERIODS = (0, 1, 2, 3, 7)  # 0: identical keys under random queries and values; otherwise all inputs repeat
DECAYS = ("0", "-1e-4", "-5", "mixed", "neighbours")
HEADS, KEY, VALUE = 2, 8, 8
LOWER_BOUND = -5.0
SEGMENT = 64  # tokens of the float64 recurrence between two kept states


@dataclass(frozen=True)
class RepeatCase:
    """One kind of input; `decay` names a log decay, see `_log_decay`."""

    period: int
    beta: float
    decay: str
    length: int


def cases(lengths: tuple[int, ...] = LENGTHS) -> Iterator[RepeatCase]:
    """The full grid."""
    for length in lengths:
        for period in PERIODS:
            for beta in BETAS:
                for decay in DECAYS:
                    yield RepeatCase(period, beta, decay, length)


def errors(batch: list[RepeatCase], seed: int = 0) -> list[dict[str, float]]:
    """Relative errors of each case by quantity, all of one length; infinite where a value is not finite."""
    inputs = {name: torch.cat(rows) for name, rows in _inputs(batch, seed).items()}
    wide = _run({name: value.double() for name, value in inputs.items()}, recurrence=True)
    narrow = _run(inputs, recurrence=False)
    # dg / dx = g (1 + g / 5); exactly at 0 and -5 it vanishes, and the gradient of g itself is compared.
    slope = inputs["g"].double() * (1 - inputs["g"].double() / LOWER_BOUND)
    slope = torch.where(slope == 0, 1.0, slope)
    for found in (wide, narrow):
        found["gate"] = found.pop("g").double() * slope
    return [
        {name: _relative(narrow[name][row].double(), wide[name][row]) for name in wide}
        for row in range(len(batch))
    ]


def measure(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """One record per length: the worst error of the grid, its case and its quantity."""
    records = []
    for length in lengths:
        grid = list(cases((length,)))
        worst, quantity, case = 0.0, "", grid[0]
        for start in range(0, len(grid), 25):
            batch = grid[start : start + 25]
            for each, found in zip(batch, errors(batch), strict=True):
                name = max(found, key=lambda key: found[key])
                if found[name] > worst:
                    worst, quantity, case = found[name], name, each
        records.append(
            {
                "name": f"repeats at {length} tokens",
                "asked": LIMIT,
                "measured": worst,
                "pass": worst <= LIMIT,
                "detail": {"cases": len(grid), "worst": quantity, "case": str(case)},
            }
        )
    return records


def main(arguments: list[str]) -> int:
    """`longstrand bench repeats [LENGTH ...]`."""
    options_of = command_line("repeats", __doc__)
    options_of.add_argument("lengths", type=parsed_length, nargs="*", default=list(LENGTHS), metavar="LENGTH")
    return show(measure(options_of.parse_args(arguments).lengths))


def _inputs(batch: list[RepeatCase], seed: int) -> dict[str, list[Tensor]]:
    rows: dict[str, list[Tensor]] = {name: [] for name in ("q", "k", "v", "g", "beta", "state", "dy", "dz")}
    for number, case in enumerate(batch):
        generator = torch.Generator().manual_seed(1000 * seed + number)

        def draw(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(1, *shape, generator=generator)

        for name, width in (("q", KEY), ("k", KEY), ("v", VALUE)):
            values = draw(case.length, HEADS, width)
            period = case.period or (1 if name == "k" else case.length)
            rows[name].append(values[:, torch.arange(case.length) % period])
        rows["g"].append(_log_decay(case.decay).expand(1, case.length, HEADS, KEY))
        rows["beta"].append(torch.full((1, case.length, HEADS), case.beta))
        rows["state"].append(0.3 * draw(HEADS, KEY, VALUE))
        rows["dy"].append(draw(case.length, HEADS, VALUE))
        rows["dz"].append(draw(HEADS, KEY, VALUE))
    return rows


def _log_decay(name: str) -> Tensor:
    """[H, K]: one value, or `mixed` over channels, or one channel at -5 and all others at -1e-4."""
    if name == "mixed":
        return torch.linspace(0, 1, HEADS * KEY).square().view(HEADS, KEY) * LOWER_BOUND
    decay = torch.full((HEADS, KEY), -1e-4 if name == "neighbours" else float(name))
    if name == "neighbours":
        decay[:, 3] = LOWER_BOUND
    return decay


def _run(inputs: dict[str, Tensor], recurrence: bool) -> dict[str, Tensor]:
    leaves = {n: inputs[n].clone().requires_grad_() for n in ("q", "k", "v", "g", "beta", "state")}
    if not recurrence:
        out, last = kda(**leaves)
    else:
        tokens = [leaves[name].split(SEGMENT, dim=1) for name in ("q", "k", "v", "g", "beta")]
        last, parts = leaves["state"], []
        for segment in zip(*tokens, strict=True):
            part, last = checkpoint(kda_reference, *segment, last, use_reentrant=False)
            parts.append(part)
        out = torch.cat(parts, dim=1)
    torch.autograd.backward([out, last], [inputs["dy"], inputs["dz"]])
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        gradients[name] = leaf.grad
    return {"out": out.detach(), "last": last.detach(), **gradients}


def _relative(value: Tensor, truth: Tensor) -> float:
    if not bool(value.isfinite().all()):
        return float("inf")
    return float((value - truth).norm() / truth.norm().clamp(min=1e-30))
