"""What a run folder holds, read with checks: each file may be absent; corrupt may be those that only compare."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstrand.errors import UserError
from longstrand.plan.plan_files import flaw_of_memory, flaw_of_plan
from longstrand.report.certificate import check_certificate
from longstrand.report.forms import flaw_of_forms
from longstrand.report.ledger import flaw_of_ledger
from longstrand.report.steps import LARGEST, is_shown, read_steps
from longstrand.series import Series, read_series
from longstrand.wording import one_line

CERTIFICATE = "certificate.json"  # which is no file of a run: certify writes it into any folder
PLAN, MEMORY = "plan.json", "memory.json"  # which older runs have not
STEPS, KERNELS, LEDGER = "metrics.jsonl", "kernels.json", "data.json"
FILES = ("run.toml", KERNELS, LEDGER, STEPS, "evaluate.json")


@dataclass(frozen=True)
class RunFolder:
    """The files of a run as values; None or empty where a file is absent.

    Args:
        metrics: one record per step, steps increasing.
        torn: whether the last line of metrics.jsonl is incomplete, as in a run that is still writing it.
        odd: what its other lines hold that a run does not write, a sentence about each kind.
        kernels, ledger: as they stand, whatever they hold.
        formless: what about them is not as a run writes it, a sentence about each.
        plan, memory: None, too, where the file cannot be used.
        damaged: why not, a sentence about each.
    """

    path: Path
    recipe: dict[str, Any] | None
    recipe_text: str | None
    kernels: Any
    ledger: Any
    metrics: list[dict[str, Any]]
    torn: bool
    series: list[Series]
    odd: tuple[str, ...] = ()
    formless: tuple[str, ...] = ()
    certificate: Any = None
    plan: Any = None
    memory: Any = None
    damaged: tuple[str, ...] = ()

    @property
    def flaws(self) -> tuple[str, ...]:
        """A sentence about each thing that is wrong with a file and that the report can do without."""
        return (*self.odd, *self.formless, *self.damaged)

    def setting(self, section: str, key: str) -> Any:
        """A setting of run.toml, None where it is absent."""
        values = (self.recipe or {}).get(section)
        return values.get(key) if isinstance(values, dict) else None

    def first(self, name: str) -> Series | None:
        """The series of this name with the lowest step."""
        return min(self.named(name), key=lambda series: series["step"], default=None)

    def last(self, name: str) -> Series | None:
        """The series of this name with the highest step."""
        return max(self.named(name), key=lambda series: series["step"], default=None)

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it is a number that can be drawn."""
        rows = [row for row in self.metrics if is_shown(row.get(key))]
        return [row["step"] for row in rows], [float(row[key]) for row in rows]

    def named(self, name: str) -> list[Series]:
        """All series of this name."""
        return [series for series in self.series if series["name"] == name]


def read_run_folder(path: Path) -> RunFolder:
    """Everything the report needs of a run.

    Raises:
        UserError: no such folder, none of a run's files in it, or a corrupt file, in one line.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder; give the folder that `longstrand train` wrote")
    if not any((path / name).exists() for name in FILES):
        raise UserError(f"{path}: not a run folder, it holds none of {', '.join(FILES)}")
    recipe_text = _read_text(path / "run.toml")
    steps = read_steps(path / STEPS, _read_text(path / STEPS) or "")
    kernels, no_forms = _read_shown(path / KERNELS, flaw_of_forms)
    ledger, no_ledger = _read_shown(path / LEDGER, flaw_of_ledger)
    plan, no_plan = _read_checked(path / PLAN, flaw_of_plan)
    memory, no_memory = _read_checked(path / MEMORY, flaw_of_memory)
    return RunFolder(
        path=path,
        recipe=_parse_recipe(path / "run.toml", recipe_text),
        recipe_text=recipe_text,
        kernels=kernels,
        ledger=ledger,
        formless=tuple(sentence for sentence in (no_forms, no_ledger) if sentence),
        metrics=steps.records,
        torn=steps.torn,
        odd=steps.odd,
        series=_read_series(path / "evaluate.json"),
        certificate=check_certificate(path / CERTIFICATE, _read_json(path / CERTIFICATE)),
        plan=plan,
        memory=memory,
        damaged=tuple(sentence for sentence in (no_plan, no_memory) if sentence),
    )


def _read_text(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}; the file is damaged") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: a folder is in the place of this file; move it away") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot read: {error.strerror}; check its permissions and its disk"
        ) from error


def _read_series(path: Path) -> list[Series]:
    """The series, each number of which can be drawn."""
    found = read_series(path)
    for number, series in enumerate(found):
        sums = [
            value for row in series.get("documents", []) for key in ("weight", "nats") for value in row[key]
        ]
        means = [row[key] for row in (series, *series["buckets"]) for key in ("nats", "low", "high")]
        for value in (*means, *sums):
            if value is not None and not is_shown(value):
                raise UserError(
                    f"{path}: series {number}: {value:g} is beyond {LARGEST:g}; delete the file and evaluate again"
                )
    return found


def _parse_recipe(path: Path, text: str | None) -> dict[str, Any] | None:
    try:
        return None if text is None else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML ({one_line(error)}); restore it from the recipe") from error


def _read_json(path: Path) -> Any:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({one_line(error)}); the file is damaged") from error


def _read_shown(path: Path, flaw_of: Callable[[Any], str | None]) -> tuple[Any, str | None]:
    """The value of a file that is shown in any form, and what is wrong with the one it has."""
    found = _read_json(path)
    flaw = None if found is None and not path.exists() else flaw_of(found)
    return found, None if flaw is None else f"{path.name}: damaged: {flaw}; shown as it stands."


def _read_checked(path: Path, flaw_of: Callable[[Any], str | None]) -> tuple[Any, str | None]:
    """The value of a file that the report can do without, or why it cannot be used."""
    try:
        found = _read_json(path)
    except UserError as error:
        flaw: str | None = str(error).removeprefix(f"{path}: ").rpartition("; ")[0]
    else:
        flaw = None if found is None and not path.exists() else flaw_of(found)
    return (found, None) if flaw is None else (None, f"{path.name}: damaged: {flaw}; nothing compared.")
