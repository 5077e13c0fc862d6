"""What people read: numbers as units, percentages, counts, times, bytes; an error in a line."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads numpy
    from longstrand.buckets import Estimate

_THIN = "\u202f"
_MINUS = "\u2212"
_DASH = "\u2013"


@dataclass(frozen=True)
class Unit:
    """How a loss in nats is shown: its name and the factor to it."""

    name: str
    factor: float

    def show(self, nats: float | None) -> str:
        """A loss with its digits, a dash where there is none."""
        return _DASH if nats is None else number(nats * self.factor, 3)


BITS_PER_BASE = Unit("bits per base", 1 / math.log(2))
NATS_PER_TOKEN = Unit("nats per token", 1.0)


def unit_for(tokenizer: object, formats: Collection[str] = ()) -> Unit:
    """Bits per base where each token is one letter of FASTA, nats per token otherwise."""
    return BITS_PER_BASE if tokenizer == "bases" and set(formats) <= {"fasta"} else NATS_PER_TOKEN


def number(value: float, digits: int) -> str:
    """Fixed digits, thousands separated, a true minus sign."""
    if not math.isfinite(value):
        return "not finite"
    shown = f"{value:,.{digits}f}"
    return shown.replace("-", "" if float(shown.replace(",", "")) == 0 else _MINUS)


def percent(part: float, digits: int = 1) -> str:
    """A part of one as a percentage."""
    return f"{number(100 * part, digits)}{_THIN}%"


def interval(estimate: Estimate, sequences: int) -> str:
    """The interval of a percentage, or that there is none."""
    if sequences < 2:
        return "one sequence, no interval"
    return f"{number(100 * estimate.low, 1)} to {percent(estimate.high)}"


def places(layers: Sequence[int | str]) -> str:
    """Layers by number, those in a row together, or what is none: "layers 0-2, 4", "layer 3", "head"."""
    runs: list[list[int | str]] = []
    for layer in layers:
        follows = runs and isinstance(layer, int) and runs[-1][-1] == layer - 1
        runs[-1].append(layer) if follows else runs.append([layer])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    num_layers = sum(isinstance(layer, int) for layer in layers)
    return f"layer{'s' * (num_layers > 1)} {words}" if num_layers else words


def count(value: int) -> str:
    """A count with thousands separated."""
    return f"{value:,}"


def tokens_range(start: int, end: int) -> str:
    """A bucket in words."""
    return f"{start:,}{_DASH}{end:,}"


def short_tokens(tokens: int) -> str:
    """A token count for an axis: 512, 1k, 96k, 1M; exact, in units of 1,024 where it divides."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if tokens >= size and tokens % (size // 4) == 0:
            return f"{tokens / size:g}{letter}"
    return f"{tokens:,}"


def size_bytes(value: float) -> str:
    """Bytes in the binary unit that leaves one to four digits before the point."""
    for unit, digits in (("B", 0), ("KiB", 0), ("MiB", 0)):
        if abs(value) < 1024:
            return f"{number(value, digits)} {unit}"
        value /= 1024
    return f"{number(value, 2)} GiB"


def operations(value: float) -> str:
    """Floating-point operations with three digits, in the unit that leaves one to four before the point."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} {units[-1]}"


def three_digits(value: float) -> str:
    """A number with up to three digits that count, thousands separated, and no exponent."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else "not finite"
    digits = 2 - math.floor(math.log10(abs(value)))
    shown = f"{round(value, digits):,.{max(0, digits)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def duration(seconds: float) -> str:
    """Seconds as the two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{number(seconds, 1)} s"
    for size, large, small, step in ((86400, "d", "h", 3600), (3600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // step} {small}"
    return f"{whole} s"


def one_line(error: Exception) -> str:
    """The first line of what an error says, its kind where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
