"""The planner's memory figure: predicted peaks against counted tensor bytes and resident memory.

Each configuration runs in processes of its own, on 1, 2 or 4 ranks: a step with its optimizer, and a second one where
it is short. About half of the configurations are chosen; the others are drawn from the number of the commit that last
changed an expression of the planner's, so that no expression can have been written for them.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longstrand.bench._arguments import command_line
from longstrand.bench._planned_run import Case, Found, run_case
from longstrand.bench.figures import show
from longstrand.errors import RunFailed
from longstrand.plan.memory import plan_memory
from longstrand.plan.parameters import GROUPS

COUNTED, RESIDENT = 0.05, 0.10
NUM_DRAWN = 15
SECONDS = 900
EXPRESSIONS = (
    *(
        "chunked",
        "held",
        "index_keys",
        "job",
        "layers",
        "memory",
        "ops",
        "parameters",
        "plain",
        "rounds",
        "rows",
    ),
    *("shared_layers", "sizes", "streams", "tape", "walk"),
)
"""The modules of `longstrand.plan` that a plan's bytes are written in."""

COST = 160_000  # tokens of the toy that a drawn configuration may take the time of
ROOM_BYTES = 8 << 30  # of all ranks together

CHOSEN = (
    Case(4096),
    Case(16_384, memory={"tile": 512}),
    Case(65_536, memory={"tile": 2048}),
    Case(524_288, memory={"tile": 2048, "offload": "disk"}),
    Case(131_072, dtype="bfloat16", memory={"keep_every": 2}),
    Case(16_384, memory={"recompute": False}),
    Case(16_384, form="portable"),
    Case(32_768, width=256, dtype="bfloat16", memory={"tile": 2048}),
    Case(16_384, width=512, layers=8, memory={"tile": 512, "keep_every": 3}),
    Case(8192, width=1024),
    Case(16_384, width=512, dtype="bfloat16", trainable=("experts", "kda")),
    Case(65_536, parallel={"context": 4}),
    Case(32_768, width=256, memory={"keep_fronts": True}, parallel={"context": 2}),
    Case(32_768, width=512, dtype="bfloat16", parallel={"context": 2, "expert": 2}),
    Case(16_384, width=512, sequences=4, parallel={"data": 2}),
    Case(16_384, width=256, trainable=("head",), memory={"tile": 2048}),
    Case(16_384, width=256, indexer="warmup", parallel={"context": 2}),
)


def drawn(seed: int, count: int = NUM_DRAWN) -> list[Case]:
    """Configurations of every kind, as many as asked, the same ones for a seed."""
    chance, found = random.Random(seed), list[Case]()
    while len(found) < count:
        case = _draw(chance)
        ranks, factor = case.ranks, (case.width / 128) ** 1.6
        whole = plan_memory(case.job).device_bytes * ranks
        if case.length * case.sequences * factor <= COST and whole <= ROOM_BYTES:
            found.append(case)
    return found


def _draw(chance: random.Random) -> Case:
    ranks = chance.choice([1, 1, 2, 4])
    parallel: dict[str, int] = {}
    if ranks > 1:
        parallel = {chance.choice(["context", "data"]): ranks}
        if ranks == 4 and chance.random() < 0.5:
            parallel = {"context": 2, "data": 2}
        if chance.random() < 0.4:
            parallel["expert"] = 2
    memory: dict[str, Any] = {"tile": chance.choice([256, 512, 1024, 2048, 4096])}
    lever = chance.choice(["none", "none", "keep_every", "disk", "recompute", "keep_fronts"])
    if lever == "keep_every":
        memory["keep_every"] = chance.choice([2, 3])
    elif lever == "disk":
        memory["offload"] = "disk"
    elif lever == "recompute":
        memory["recompute"] = False
    elif lever == "keep_fronts" and parallel.get("context", 1) > 1:
        memory["keep_fronts"] = True
    return Case(
        int(4096 * 2 ** chance.uniform(0, 5)),
        width=chance.choice([128, 256, 512, 1024]),
        layers=chance.choice([4, 4, 8]),
        dtype=chance.choice(["float32", "bfloat16"]),
        sequences=max(parallel.get("data", 1), chance.choice([1, 1, 2])),
        **_draw_learning(chance, recompute=lever != "recompute"),
        memory=memory,
        parallel=parallel,
    )


def _draw_learning(chance: random.Random, *, recompute: bool) -> dict[str, Any]:
    """What learns: everything but the indexer half of the time; only recomputed tiles have a side loss of a pass."""
    kind = chance.choice(["all", "all", "all", "some", "sparse", "warmup", "aux"])
    if kind == "some":
        groups = [group for group in GROUPS if group != "indexer"]
        return {"trainable": tuple(chance.sample(groups, chance.choice([1, 2, 3])))}
    if kind == "sparse" or (kind == "warmup" and recompute):
        return {"indexer": kind}
    return {"balance": kind} if kind == "aux" and recompute else {}


def measure(cases: Sequence[Case] | None = None) -> list[dict[str, Any]]:
    """All configurations; one record for each way to measure, with the table of both."""
    commit, seed = _planner_commit()
    if cases is None:
        cases = [*CHOSEN, *drawn(seed)]
    found = [(case, measured) for case in cases if (measured := _run(case)) is not None]
    rows = [_row(case, measured, index >= len(CHOSEN)) for index, (case, measured) in enumerate(found)]
    errors = [(_errors(case, measured), case) for case, measured in found]
    failed = len(cases) - len(found)
    columns = ["", "configuration", "ranks", "planned MiB", "counted", "error", "resident", "error"]
    table = {"columns": columns, "rows": rows, "name": "planned_memory"}
    drawn_from = f"{sum(row[0] == 'drawn' for row in rows)} drawn from commit {commit[:10]}"
    records = []
    for number, (name, limit) in enumerate(
        (("counted tensor bytes", COUNTED), ("resident memory", RESIDENT))
    ):
        worst, case = max(errors, key=lambda each: abs(each[0][number]))
        within = sum(abs(each[number]) <= limit for each, _ in errors)
        records.append(
            {
                "name": f"planned peak against {name}, {len(found)} configurations",
                "asked": f"all within {limit:.0%}",
                "measured": f"{within} within; largest {worst[number]:+.1%} ({case.named()})",
                "pass": within == len(cases) and not failed,
                "detail": {"failed": failed, "drawn": drawn_from} | ({"table": table} if not number else {}),
            }
        )
    return records


def _run(case: Case) -> Found | None:
    try:
        found = run_case(case, SECONDS)
    except RunFailed as error:
        print(f"{case.named()}: {error}", file=sys.stderr, flush=True)
        return None
    counted, resident = _errors(case, found)
    print(f"{case.named()}: counted {counted:+.1%}, resident {resident:+.1%}", file=sys.stderr, flush=True)
    return found


def _errors(case: Case, found: Found) -> tuple[float, float]:
    """Of the plan, relative to what was counted and what was resident."""
    planned = plan_memory(case.job).device_bytes
    return planned / found.counted - 1, planned / found.resident - 1


def _row(case: Case, found: Found, is_drawn: bool) -> list[str]:
    counted, resident = _errors(case, found)
    sizes = (plan_memory(case.job).device_bytes, found.counted, found.resident)
    planned, living, held = (f"{size / 2**20:,.1f}" for size in sizes)
    kind = "drawn" if is_drawn else "chosen"
    return [
        kind, case.named(), str(case.ranks), planned, living, f"{counted:+.1%}", held, f"{resident:+.1%}",
    ]  # fmt: skip


def _planner_commit() -> tuple[str, int]:
    """The last commit that changed an expression of memory, and a seed from it."""
    folder = Path(__file__).parent.parent / "plan"
    files = [f"{name}.py" for name in EXPRESSIONS]
    command = ["git", "log", "-1", "--format=%H", "--", *files]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False).stdout.strip()
    if not commit:
        raise RunFailed(
            "planned_memory: the drawn half needs the repository's history, and git log finds none here"
        )
    return commit, int(commit[:12], 16)


def main(arguments: list[str]) -> int:
    """`longstrand bench planned_memory`."""
    command_line("planned_memory", __doc__).parse_args(arguments)
    return show(measure())
