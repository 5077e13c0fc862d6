"""Which question the options of `longstrand plan` ask, which of them belong to it, and what they may be."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

from longstrand.cli.plan import Options
from longstrand.errors import UserError

Question = Literal["a plan", "--fit length", "--fit devices", "--sweep", "--calibrate"]
_ALL: frozenset[Question] = frozenset(get_args(Question))
_PLANS: frozenset[Question] = _ALL - {"--calibrate"}

ALLOWED: dict[str, Set[Question]] = {
    **dict.fromkeys(("--set", "--model", "--device", "--sequences", "--host-memory", "--host-disk"), _PLANS),
    **dict.fromkeys(("--this-host", "--data-skew", "--dtype", "--trainable", "--optimizer"), _PLANS),
    "--calibrated": _PLANS,
    "--devices": _PLANS - {"--fit devices"},
    "--length": {"a plan", "--fit devices"},
    "--fit": {"--fit length", "--fit devices"},
    "--sweep": {"--sweep"},
    "--picture": {"--sweep"},
    "--write": _ALL - {"--sweep"},
    "--json": _ALL,
    "--calibrate": {"--calibrate"},
    "RECIPE": _ALL,
    "RUN": _ALL,
}
"""The questions that an option has a meaning for; both arguments are runs of a calibration too."""

_WHY = {
    ("--devices", "--fit devices"): ", which looks for it; remove it",
    ("--length", "--fit length"): ", which looks for it; remove it",
    ("--length", "--sweep"): ", which says the lengths; remove it",
    ("--write", "--sweep"): ", which has many plans; ask for one length",
    ("--picture", "a plan"): ": it shows a sweep; add --sweep 16k..4M",
    ("--picture", "--fit length"): ": it shows a sweep; ask for --sweep",
    ("--picture", "--fit devices"): ": it shows a sweep; ask for --sweep",
}

_NAMES = {"recipe": "RECIPE", "more": "RUN", "overrides": "--set", "lengths": "--sweep", "as_json": "--json"}

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""What no comment of TOML may hold, nor a line of a message."""

_RANGES = {
    "--devices": (1, 2**20, "devices"),
    "--sequences": (1, 2**20, "sequences of a step"),
    "--host-memory": (0, 2**30, "GiB of one host"),
    "--host-disk": (0, 2**30, "GiB of one host"),
}


def question_of(options: Options) -> Question:
    """The question that the options ask.

    Raises:
        UserError: they ask two, an option has no meaning for it, or a number is out of its range.
    """
    if options.fit not in (None, "length", "devices"):
        raise UserError(f"--fit {options.fit}: must be length or devices")
    question: Question = "a plan"
    if options.calibrate:
        question = "--calibrate"
    elif options.lengths is not None:
        question = "--sweep"
    elif options.fit is not None:
        question = "--fit length" if options.fit == "length" else "--fit devices"
    given = _given(options)
    for option in given:
        if question not in ALLOWED[option]:
            raise UserError(_no_meaning(option, question))
    for option, (least, most, what) in _RANGES.items():
        number = given.get(option, least)
        if not least <= number <= most:  # NaN is in no range
            raise UserError(f"{option} {number}: must be {what}, from {least} to {most:,}")
    _require_files(options)
    return question


def require_new(option: str, path: Path) -> None:
    """Refuses to overwrite.

    Raises:
        UserError: the file exists.
    """
    try:
        exists = path.exists()
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}; choose another name") from error
    if exists:
        raise UserError(
            f"{option} {path}: exists, and is never overwritten; remove it or choose another name"
        )


def _given(options: Options) -> dict[str, Any]:
    """Values that are not absent, by the option's name."""
    values = {field.name: getattr(options, field.name) for field in fields(Options)}
    return {
        _NAMES.get(name, f"--{name.replace('_', '-')}"): value
        for name, value in values.items()
        if value is not None and value is not False and value != []
    }


def _no_meaning(option: str, question: Question) -> str:
    if option in ("--fit", "--sweep"):
        return f"{option} and {question}: each is a question of its own; ask one at a time"
    return f"{option}: has no meaning with {question}{_WHY.get((option, question), '; remove it')}"


def _require_files(options: Options) -> None:
    picture = options.picture
    if picture is not None and picture.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"--picture {picture}: must end in .svg or .png")
    for option, path in (("--picture", picture), ("--write", options.write)):
        if path is not None:
            if CONTROL.search(str(path)):
                raise UserError(f"{option} {str(path)!r}: has a control character; choose another name")
            require_new(option, path)
            if not path.absolute().parent.is_dir():
                raise UserError(
                    f"{option} {path}: {path.parent} is no folder; make it, or choose another path"
                )
