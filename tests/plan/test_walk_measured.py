"""A plan's peaks of living tensors against a real step's, for one small configuration of each kind."""

import pytest
import torch

from longstrand.bench._planned_run import Case, run_case
from longstrand.memory.counted import CountedMemory
from longstrand.plan.memory import plan_memory
from longstrand.plan.terms import total

# Left out of a plan are a few tensors of a row per tile, layer or rank: with the toy's smallest tiles, up to 1 %.
TILE = {"tile": 700}
RANKS = {"context": 2}
CASES = {
    "one process": Case(3000, memory={**TILE, "keep_every": 2}),
    "bfloat16, in a file": Case(3000, dtype="bfloat16", sequences=2, memory={**TILE, "offload": "disk"}),
    "kept activations": Case(2500, layers=5, memory={**TILE, "recompute": False}),
    "context ranks": Case(5000, memory=TILE, parallel=RANKS),
    "context ranks with fronts kept": Case(
        5000, dtype="bfloat16", memory={**TILE, "keep_fronts": True}, parallel=RANKS
    ),
    "fronts kept in plain torch": Case(
        5000, form="portable", memory={"tile": 625, "keep_fronts": True}, parallel=RANKS
    ),
    "the head alone": Case(3000, trainable=("head",), memory=TILE),
    "the head alone, context ranks": Case(5000, trainable=("head",), memory=TILE, parallel=RANKS),
    "frozen layers below": Case(2500, layers=5, trainable=("mla",), memory={**TILE, "recompute": False}),
    "frozen layers below, context ranks": Case(5000, trainable=("mla",), memory=TILE, parallel=RANKS),
    "a learning indexer": Case(5000, indexer="sparse", memory={"tile": 2048}, parallel=RANKS),
    "warm-up": Case(3000, layers=8, indexer="warmup", memory={**TILE, "keep_every": 2}),
    "warm-up, context ranks": Case(5000, dtype="bfloat16", indexer="warmup", memory=TILE, parallel=RANKS),
    "a balance loss": Case(2500, balance="aux", sequences=2, memory=TILE),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planned_phase_is_what_lives(name):
    if (why_not := CountedMemory(torch.device("cpu")).why_not) is not None:
        pytest.skip(why_not)
    case = CASES[name]
    found, planned = run_case(case, timeout=200), plan_memory(case.job)
    # A tile that is written or read behind the computation lives longer where other processes keep the disk waiting.
    bound = 0.05 if case.memory.get("offload") == "disk" else 0.02
    assert planned.device_bytes == pytest.approx(found.counted, rel=bound)
    for phase in ("forward", "backward"):
        assert total(planned.phases[phase]) == pytest.approx(found.phases[phase], rel=1.25 * bound), phase
