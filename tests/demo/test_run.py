"""The demo from the shipped checkpoint to the report, cut down to one step of short sequences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longstrand.architecture import Architecture
from longstrand.bench.demo import improvements
from longstrand.buckets import BucketSums
from longstrand.config import load_recipe
from longstrand.demo import run as demo
from longstrand.demo import run_demo
from longstrand.demo.pretrain import CONFIG, SHIPPED
from longstrand.model import load_model
from longstrand.series import read_series

SMALL = ["data.length=2048", "train.steps=1", "train.warmup_steps=0", "evaluate.sequences=2", "run.threads=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small demo with two seeds."""
    out = tmp_path_factory.mktemp("small") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "load_recipe", lambda name: load_recipe(name, SMALL))
        assert run_demo(out, seeds=2) == out / "seed_0" / "report.html"
    return out


def test_two_seeds_score_the_same_held_out_sequences_from_the_same_weights(finished: Path):
    runs = [read_series(finished / f"seed_{seed}" / "evaluate.json") for seed in (0, 1)]
    names = ["before", "control before", "after", "control after"]
    assert [[one["name"] for one in run] for run in runs] == [names, names]
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][2]["nats"] != runs[1][2]["nats"]


def test_a_finished_demo_only_writes_its_report_again(finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "load_recipe", lambda name: load_recipe(name, SMALL))
    run = finished / "seed_1"
    metrics = (run / "metrics.jsonl").read_bytes()
    (run / "report.html").unlink()
    run_demo(finished, seeds=2)
    assert (run / "report.html").exists()
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_new_demo_has_no_word_of_going_on_and_one_that_is_there_has(
    finished: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "load_recipe", lambda name: load_recipe(name, SMALL))
    log = finished / "seed_0" / "log.txt"
    assert "resume" not in log.read_text()
    before = log.read_text().count("going on from step_000001")
    run_demo(finished, seeds=2)
    assert log.read_text().count("going on from step_000001") == before + 1


def test_the_shipped_checkpoint_has_the_curriculum_s_shape_and_a_card():
    model = load_model(SHIPPED / "checkpoint")
    assert model.architecture == Architecture.from_hf(json.loads(CONFIG.read_text()))
    assert "Limits" in (SHIPPED / "checkpoint" / "README.md").read_text()
    assert sum(file.stat().st_size for file in (SHIPPED / "checkpoint").iterdir()) < 8e6


def test_improvements_are_bits_saved_early_and_late():
    def sums(early: float, late: float) -> BucketSums:
        weight = np.array([[1024.0, 1024.0], [1024.0, 512.0]])
        return BucketSums(
            (0, 1024, 2048), ("a", "b"), weight, weight * [early, late] * np.log(2), (2048, 1536), 0, 0
        )

    early, late = improvements(sums(2.0, 1.5), sums(1.9, 1.0))
    assert early["bits"] == pytest.approx(0.1) and late["bits"] == pytest.approx(0.5)
    assert early["low"] == pytest.approx(0.1) and late["high"] == pytest.approx(0.5)
