"""A plan's peak of living tensors against a real step's, for one small configuration of each kind."""

import pytest
import torch

from longstrand.bench._planned_run import Case, run_case
from longstrand.memory.counted import CountedMemory
from longstrand.plan.memory import plan_memory

# Left out of a plan are a few tensors of a row per tile, layer or rank: with the toy's smallest tiles, up to 1 %.
CASES = {
    "one process": Case(3000, memory={"tile": 700, "keep_every": 2}),
    "bfloat16, in a file": Case(3000, dtype="bfloat16", sequences=2, memory={"tile": 700, "offload": "disk"}),
    "kept activations": Case(2500, layers=5, memory={"tile": 700, "recompute": False}),
    "context ranks": Case(5000, memory={"tile": 700}, parallel={"context": 2}),
    "context ranks with fronts kept": Case(
        5000, dtype="bfloat16", memory={"tile": 700, "keep_fronts": True}, parallel={"context": 2}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planned_peak_is_what_lives(name):
    if (why_not := CountedMemory(torch.device("cpu")).why_not) is not None:
        pytest.skip(why_not)
    case = CASES[name]
    found = run_case(case, timeout=200)
    assert plan_memory(case.job).device_bytes == pytest.approx(found.counted, rel=0.03)


def test_no_other_phase_is_planned_higher_than_backward():
    """Of a step that trains everything: what forward keeps is still there, and a tile's graph on top."""
    for case in CASES.values():
        assert plan_memory(case.job).peak_phase == "backward"
