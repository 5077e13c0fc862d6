"""What a plan of a machine takes for its threads is what a run there has; a skew that cannot be is refused."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from called import caller
from planned import REAL, TOY, with_ranks

from longstrand.bench.crash import write_inputs
from longstrand.config import ParallelSection, load_recipe
from longstrand.errors import UserError
from longstrand.plan.devices import find_device
from longstrand.plan.job import Job, most_skewed, threads_of_a_rank
from longstrand.plan.memory import plan_memory
from longstrand.plan.seconds import plan_seconds
from longstrand.train.planning import job_of


def test_a_rank_has_what_the_recipe_says_or_its_share():
    assert threads_of_a_rank(3, 8, 16) == 3
    assert threads_of_a_rank(None, 4, 16) == 4
    assert threads_of_a_rank(None, 5, 16) == 3
    assert threads_of_a_rank(None, 32, 16) == 1


@pytest.mark.parametrize("told", [None, 1, 8])
def test_a_plan_a_recipe_and_a_run_have_the_same_threads(told, monkeypatch, capsys, tmp_path):
    """Those that torch starts with, by itself or as it is told, in a process of its own; two ranks have half."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told:
        monkeypatch.setenv("OMP_NUM_THREADS", str(told))
    code = "import torch; print(torch.get_num_threads())"
    started = int(subprocess.check_output([sys.executable, "-c", code]))
    write_inputs(tmp_path, steps=5)
    recipe = load_recipe(tmp_path / "recipe.toml")
    free = recipe.model_copy(update={"run": recipe.run.model_copy(update={"threads": None})})
    torch.set_num_threads(started)
    try:
        assert job_of(free, TOY, torch.device("cpu")).threads == started
    finally:
        torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    call = caller(monkeypatch, capsys, "plan")
    half = max(1, started // 2)
    for arguments, threads in (
        (("--model", "toy", "--length", "16k"), started),
        (("--model", "toy", "--length", "16k", "--devices", "2"), half),
        (("--model", "toy", "--length", "16k", "--device", "H200"), None),
        (("recipe.toml", "--set", "run.threads=none"), started),
        (("recipe.toml", "--set", "run.threads=none", "--set", "parallel.data=2"), half),
        (("recipe.toml", "--set", "run.threads=3"), 3),
    ):
        called = call(*arguments, "--json")
        assert json.loads(called.out)["threads_per_rank"] == threads, (arguments, called.err)
    assert f"1 x CPU, {started} CPU thread" in call("--model", "toy", "--length", "16k").out


@pytest.mark.parametrize("skew", [float("nan"), float("inf"), 1e9, 36.02, 0.99, -1.0])
def test_a_skew_that_no_choice_of_experts_has_is_refused(skew):
    """288 experts, 8 of a token: a rank that all tokens choose with all their experts has 288 / 8 times the mean."""
    with pytest.raises(UserError, match=r"--data-skew .*: must be from 1 to 36.00: a token chooses 8 of 288"):
        Job(REAL, 2**20, data_skew=skew)


def test_a_model_without_experts_has_no_skew():
    dense = dataclasses.replace(TOY, mlp_layer_types=("dense",) * TOY.num_hidden_layers)
    assert most_skewed(dense) == 1.0
    with pytest.raises(UserError, match="must be 1: this model has no routed experts; remove it"):
        Job(dense, 2**14, data_skew=1.5)


def test_the_busiest_of_few_ranks_receives_all_rows_at_most():
    """Of 4 expert ranks the busiest has 4 times the mean, of 64 with 8 experts or fewer 36 times."""
    most = Job(REAL, 2**20, parallel=ParallelSection(context=64, expert=4), data_skew=36.0)
    four, more = dataclasses.replace(most, data_skew=4.0), with_ranks(most, expert=32)
    assert most.skew == 4.0 and with_ranks(more, expert=36).skew == 36.0
    device = find_device("B200")
    assert plan_seconds(most, device).total == plan_seconds(four, device).total
    assert plan_memory(most).device_bytes == plan_memory(four).device_bytes
    assert plan_seconds(more, device).total > plan_seconds(most, device).total
    assert with_ranks(most, expert=1).skew == 1.0
