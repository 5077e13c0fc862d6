"""The planner's memory figure: what the draw depends on, and what it draws."""

import ast
import re
from pathlib import Path

from longstrand import plan
from longstrand.bench._planned_run import _settings
from longstrand.bench.planned_memory import CHOSEN, EXPRESSIONS, NUM_DRAWN, drawn

FOLDER = Path(plan.__file__).parent


def imported_by(module):
    """Modules of `longstrand.plan` that one of them imports."""
    nodes = ast.walk(ast.parse((FOLDER / f"{module}.py").read_text()))
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longstrand.plan"):
            name = node.module.removeprefix("longstrand.plan").removeprefix(".")
            found |= {name} if name else {alias.name for alias in node.names}
    return found


def test_the_draw_depends_on_every_module_that_bytes_are_written_in():
    """And on none of seconds, links or rates: those with a number of bytes are what `memory` reaches."""
    reached, left = set(), {"memory"}
    while left:
        module = left.pop()
        reached.add(module)
        left |= imported_by(module) - reached
    assert reached - {"terms"} == set(EXPRESSIONS)


def test_a_draw_has_all_that_can_learn():
    """Each kind within six draws; none that training would refuse."""
    found = [case for seed in range(6) for case in drawn(seed)]
    assert len(CHOSEN) + NUM_DRAWN >= 30
    names = " ".join(case.named() for case in found)
    for kind in ("indexer sparse", "indexer warmup", "balance aux"):
        assert kind in names
    assert any(case.trainable != ("all",) for case in found)
    for case in (*found, *CHOSEN):
        assert _settings(case, 1).indexer == case.indexer
        assert case.memory.get("recompute", True) or not re.search("warmup|aux", case.named())
