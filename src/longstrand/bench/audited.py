"""Whether audit fails for what silently runs in place of what was asked, and names the layer and op.

longstrand bench audited
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longstrand.bench import _misfits as misfits
from longstrand.bench._arguments import command_line
from longstrand.bench._faults import Context
from longstrand.bench.caught import small_recipe
from longstrand.bench.figures import show
from longstrand.checks.audit import run_audit
from longstrand.config import KernelsSection, ParallelSection, Recipe
from longstrand.errors import LongstrandError
from longstrand.ops.select import SELECT
from longstrand.ops.short_conv import SHORT_CONV

COLUMNS = ("put into the product", "asked", "measured", "audit says")
AUTO, NATIVE = KernelsSection(), KernelsSection(require="native")


@dataclass(frozen=True)
class Misfit:
    """What is put into the product, the recipe's [kernels], and what the audit must name first."""

    put: Callable[[], Context]
    where: str
    kernels: KernelsSection = AUTO


MISFITS: dict[str, Misfit] = {
    "dense fallback": Misfit(partial(misfits.dense_attention_in, 3), "layer 3, sparse_attention"),
    "wrong pool size": Misfit(misfits.default_pool_size, "layer 1, select_pools"),
    "unavailable kernel": Misfit(
        partial(misfits.refused, SELECT, "not built for this processor"), "layer 1, select_pools", NATIVE
    ),
    "padded head": Misfit(partial(misfits.padded_heads_in, 2), "layer 2, kda"),
    "changed dtype": Misfit(partial(misfits.decay_in_bfloat16_in, 2), "layer 2, log_decay"),
    "fallback under require": Misfit(
        partial(misfits.refused, SHORT_CONV, "rows at uneven distances", from_tokens=2),
        "layer 0, short_conv",
        NATIVE,
    ),
}


def audited(folder: Path, misfit: Misfit | None = None) -> tuple[int, str]:
    """Exit code and message of an audit of a small recipe: in float32, as it is or with a misfit in the product."""
    recipe = audited_recipe(folder, AUTO if misfit is None else misfit.kernels)
    with nullcontext() if misfit is None else misfit.put(), redirect_stdout(io.StringIO()):
        try:
            run_audit(recipe)
        except LongstrandError as error:
            return error.exit_code, str(error)
    return 0, "what ran is what was planned and asked"


def audited_recipe(folder: Path, kernels: KernelsSection = AUTO) -> Recipe:
    """Four layers with experts on one process; its pools are of four tokens, and of sixteen would be a choice, too."""
    recipe = small_recipe(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"index_topk": 32}))
    return recipe.model_copy(update={"kernels": kernels, "parallel": ParallelSection()})


def measure(names: Sequence[str] = tuple(MISFITS)) -> list[dict[str, Any]]:
    """One record per misfit, and one of the product as it is, which must pass."""
    with tempfile.TemporaryDirectory() as folder:
        code, said = audited(Path(folder))
    plain = {"name": "as it is", "asked": "exit code 0", "measured": f"exit code {code}", "pass": code == 0}
    records = [plain | {"detail": {"said": said}}, *map(_record, names)]
    rows = [[r["name"], r["asked"], r["measured"], r["detail"]["said"]] for r in records]
    records[0]["detail"]["table"] = {"columns": list(COLUMNS), "rows": rows}
    return records


def _record(name: str) -> dict[str, Any]:
    misfit = MISFITS[name]
    with tempfile.TemporaryDirectory() as folder:
        code, said = audited(Path(folder), misfit)
    asked, measured = f"exit code 3: {misfit.where}", f"exit code {code}: {said.partition(':')[0]}"
    return {
        "name": name,
        "asked": asked,
        "measured": measured,
        "pass": asked == measured,
        "detail": {"said": said},
    }


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench audited`."""
    command_line("audited", __doc__).parse_args(list(arguments))
    torch.set_num_threads(1)
    return show(measure())
