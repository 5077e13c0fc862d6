"""`plan --write`: a complete recipe with the levers that a plan chose, each with why."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longstrand.atomic import write_new
from longstrand.cli.plan_options import CONTROL
from longstrand.config import Recipe, dump_toml
from longstrand.config.writing import WIDTH
from longstrand.errors import UserError
from longstrand.plan.search import Plan
from longstrand.plan.shapes import FoundShape
from longstrand.plan.summary import COSTS, effect, gib, reason, what_is_missing

DATA = "your_data.fa.gz"
_HEADER = """\
# Written by longstrand plan: {sentence}
# Comments that begin with "plan:" say why a lever is on. Lines that begin with "# name =" are settings that are absent.
#   longstrand plan {path}{room}
#     plans it as it stands
#   longstrand train {path} --dry-run
#     checks it against the data
{ask}
"""
_ASK = f"""\
# Yours to give: the data ({DATA} below), data.tokenizer where the model has its own, train.steps and train.lr.
"""
_DRAWN = """\
# model.config has its weights drawn at random. To fine-tune, put model.path = "FOLDER" in its place: the folder of the
# trained weights.
"""
_TABLE = re.compile(r"\[(\w+)\]")


def write_plan(path: Path, plan: Plan, found: FoundShape, recipe: Recipe | None, room: str) -> list[Path]:
    """Writes the recipe, and a config beside it where the model has no file; returns what was written.

    Args:
        recipe: whose other settings it keeps; None: the settings that `init` would write.
        room: options of `longstrand plan` with which the recipe is planned in the same room.

    Raises:
        UserError: a file exists or cannot be written, or the plan does not fit.
    """
    if not plan.fits:
        raise UserError(
            f"--write {path}: nothing is written, since the plan does not fit: {what_is_missing(plan)}"
        )
    written: dict[Path, str] = {}
    model: dict[str, Any] = {"path" if found.is_folder else "config": found.setting}
    if found.setting is None:
        config = path.with_name(f"{path.stem}-config.json")
        written[config] = json.dumps(found.shape.to_hf(), indent=1) + "\n"
        model = {"config": str(config)}
    settings = _settings_of(plan, model, path.stem) if recipe is None else recipe.model_dump()
    settings |= {
        "memory": _changed(plan.job.memory.model_dump()),
        "parallel": _changed(plan.job.parallel.model_dump()),
    }
    sentence = (
        f"{plan.room.num_devices} x {plan.room.device.name}, {gib(plan.memory.device_bytes)} GiB per device, "
        f"{plan.seconds.tokens_per_second(plan.job):,.0f} tokens/s expected."
    )
    ask = "" if recipe else _ASK + _DRAWN * ("config" in model)
    text = _HEADER.format(sentence=_shown(sentence), path=path, room=_shown(room), ask=ask)
    written[path] = text + _explained(dump_toml(Recipe.model_validate(settings)), plan)
    for file in written:
        if file.exists():
            raise UserError(
                f"--write {file}: exists, and is never overwritten; remove it or choose another name"
            )
    _write_all(written)
    return list(written)


def _shown(text: str) -> str:
    """As a comment may hold it: a device's name may be of several lines."""
    return CONTROL.sub("?", text)


def _settings_of(plan: Plan, model: dict[str, Any], stem: str) -> dict[str, Any]:
    job = plan.job
    return {
        "run": {"out": f"runs/{stem}", "dtype": job.dtype},
        "model": model,
        "data": {"sources": [{"path": DATA}], "length": job.length},
        "train": {
            "steps": 100,
            "lr": 1e-5,
            "warmup_steps": 10,
            "sequences_per_step": job.sequences_per_step,
            "trainable": list(job.trainable),
            "indexer": job.indexer,
            "balance": job.balance,
        },
    }


def _changed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _explained(text: str, plan: Plan) -> str:
    why = {
        step.setting: f"plan: {reason(step)}. It buys: {effect(step)}. It costs: {COSTS[step.setting]}."
        for step in plan.steps
    }
    return "\n".join(_with_comments(text.splitlines(), why)) + "\n"


def _with_comments(lines: list[str], why: dict[str, str]) -> Iterator[str]:
    section = ""
    for line in lines:
        if table := _TABLE.match(line):
            section = table[1]
        comment = why.get(f"{section}.{line.partition(' =')[0]}")
        if comment is not None:
            yield from textwrap.wrap(f"# {comment}", WIDTH, subsequent_indent="#   ")
        yield line


def _write_all(contents: dict[Path, str]) -> None:
    """All of them, or none: a rest would block the next try."""
    written: list[Path] = []
    try:
        for path, text in contents.items():
            write_new(path, text)
            written.append(path)
    except OSError as error:
        for each in written:
            each.unlink(missing_ok=True)
        raise UserError(
            f"--write {path}: cannot be written ({error.strerror}); choose another name"
        ) from None
