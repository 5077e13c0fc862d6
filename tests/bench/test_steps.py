"""What the process of a trial runs: both sides the same step, with any lever, counted and timed."""

from dataclasses import replace

import pytest

from longstrand.bench import _steps
from longstrand.bench._small_models import architecture
from longstrand.bench._trial import Trial, parser, trial_from
from longstrand.ops.native import use_native
from longstrand.plan.products import step_flops

TRIAL = Trial(300, threads=1, tile=128, kernels="portable", steps=2, seconds=60.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_steps, "MATMUL_SECONDS", 0.01)
    monkeypatch.setattr(_steps, "MATMUL", 64)
    monkeypatch.setattr(_steps, "architecture", lambda name: architecture("KDK", vocab_size=256))
    yield
    use_native("portable")


def test_both_sides_take_the_same_step(tmp_path):
    ours = _steps.run(TRIAL)
    theirs = _steps.run(replace(TRIAL, side="transformers"))
    lever = _steps.run(replace(TRIAL, offload="disk", keep_every=2, spool=str(tmp_path / "spool")))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert lever["loss"] == ours["loss"]
    assert not list((tmp_path / "spool").iterdir())


def test_a_whole_step_moves_the_weights_and_the_rates_follow_from_the_times():
    found = _steps.run(replace(TRIAL, optimizer=True, steps=3))
    assert len(found["seconds"]) == 3
    assert found["loss"] < _steps.run(TRIAL)["loss"]
    median = sorted(found["seconds"])[1]
    assert found["tokens_per_second"] == pytest.approx(300 / median)
    work = step_flops(architecture("KDK", vocab_size=256), 300) * 300 / median
    assert found["flops_per_second"] == pytest.approx(work)
    assert found["share_of_matmul"] == pytest.approx(work / found["matmul_flops_per_second"])


def test_the_profile_of_a_step_sums_to_one_and_knows_the_ops():
    found = _steps.run(replace(TRIAL, profile=True))["profile"]
    assert sum(found.values()) == pytest.approx(1)
    assert {"ops/kda", "ops/mhc", "model/linear.py"} <= found.keys()


def test_a_command_line_is_a_trial():
    given = ["--threads", "1", "--config", "wide", "--dtype", "bfloat16", "--tile", "64", "--offload", "disk"]
    trial = trial_from(parser("step", None).parse_args([*given, "--spool", "here"]), 7)
    assert (trial.tokens, trial.threads, trial.config, trial.dtype) == (7, 1, "wide", "bfloat16")
    assert (trial.levers.tile, trial.levers.offload, trial.levers.spool) == (64, "disk", "here")
