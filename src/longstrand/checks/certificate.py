"""What a certification found: in a table, in certificate.json, in one sentence for an error."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longstrand.atomic import write_atomic
from longstrand.checks.comparing import Difference

FILE = "certificate.json"
WIDTH = 100


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared, such as "ranks".
        settings: with which.
        limit: largest relative difference; 0: bit for bit.
    """

    name: str
    settings: str
    difference: Difference
    limit: float
    seconds: float

    @property
    def passed(self) -> bool:
        return self.difference.where is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "check": self.name,
            "settings": self.settings,
            "passed": self.passed,
            **{name: _as_json(value) for name, value in asdict(self.difference).items()},
            "limit": self.limit,
            "seconds": round(self.seconds, 2),
        }


@dataclass(frozen=True)
class Certificate:
    """All comparisons of a recipe.

    Attributes:
        subject: model and data, in words.
        not_checked: in words, without "Not checked:".
    """

    subject: str
    tokens: int
    checks: Sequence[Check]
    not_checked: str

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failure(self) -> str:
        """The first check that failed and where it begins to differ."""
        failed = [check for check in self.checks if not check.passed]
        first = failed[0]
        return (
            f"{first.name} ({first.settings}) differs: {first.difference.where}; "
            f"{len(failed)} of {len(self.checks)} checks failed"
        )

    def write(self, run: Path) -> Path:
        """certificate.json in the run's folder."""
        found = {
            "passed": self.passed,
            "subject": self.subject,
            "tokens": self.tokens,
            "checks": [check.as_dict() for check in self.checks],
            "not_checked": self.not_checked,
        }
        write_atomic(run / FILE, json.dumps(found, indent=1, allow_nan=False))
        return run / FILE

    def show(self, console: Console) -> None:
        console.print(self.subject, highlight=False, markup=False)
        table = Table(box=None, pad_edge=False, width=WIDTH)
        table.add_column("check", no_wrap=True)
        table.add_column("settings", ratio=4)
        for name in ("loss", "log-probs"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("worst gradient", no_wrap=True)
        table.add_column("verdict", ratio=5)
        for check in self.checks:
            table.add_row(*_cells(check), style=None if check.passed else "bold red")
        console.print(table, highlight=False)
        console.print(f"Not checked: {self.not_checked}.", highlight=False, markup=False)


def _cells(check: Check) -> tuple[str, ...]:
    found = check.difference
    same = "the same bits" if check.limit == 0 else "equal"
    return (
        check.name,
        check.settings,
        _small(found.loss),
        _small(found.logprobs),
        f"{_small(found.gradient)} {found.group}",
        same if found.where is None else f"DIFFERS: {found.where}",
    )


def _as_json(value: Any) -> Any:
    """What is no number, or infinite, as text: JSON has no word for it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _small(value: float | None) -> str:
    if value is None:
        return "\u2013"
    return "0" if value == 0 else f"{value:.1e}"
