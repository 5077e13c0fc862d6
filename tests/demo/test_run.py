"""The demo from the shipped checkpoint to the report, cut down to one step of short sequences."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_two_seeds_score_the_same_held_out_sequences_from_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "load_recipe", lambda name: load_recipe(name, SMALL))
    report = run_demo(tmp_path / "demo", seeds=2)
    assert report == tmp_path / "demo" / "seed_0" / "report.html" and report.exists()
    runs = [read_series(tmp_path / "demo" / f"seed_{seed}" / "evaluate.json") for seed in (0, 1)]
    names = ["before", "control before", "after", "control after"]
    assert [[one["name"] for one in run] for run in runs] == [names, names]
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][2]["nats"] != runs[1][2]["nats"]


def test_a_finished_demo_only_writes_its_report_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "load_recipe", lambda name: load_recipe(name, SMALL))
    report = run_demo(tmp_path / "demo")
    metrics = (tmp_path / "demo" / "metrics.jsonl").read_bytes()
    report.unlink()
    assert run_demo(tmp_path / "demo") == report and report.exists()
    assert (tmp_path / "demo" / "metrics.jsonl").read_bytes() == metrics


def test_the_shipped_checkpoint_has_the_curriculum_s_shape_and_a_card():
    model = load_model(SHIPPED / "checkpoint")
    assert model.architecture == Architecture.from_hf(json.loads(CONFIG.read_text()))
    assert "Limits" in (SHIPPED / "checkpoint" / "README.md").read_text()
    assert sum(file.stat().st_size for file in (SHIPPED / "checkpoint").iterdir()) < 8e6


def test_improvements_are_bits_saved_early_and_late():
    def sums(early: float, late: float) -> BucketSums:
        import numpy as np

        weight = np.array([[1024.0, 1024.0], [1024.0, 512.0]])
        return BucketSums(
            (0, 1024, 2048), ("a", "b"), weight, weight * [early, late] * np.log(2), (2048, 1536), 0, 0
        )

    early, late = improvements(sums(2.0, 1.5), sums(1.9, 1.0))
    assert early["bits"] == pytest.approx(0.1) and late["bits"] == pytest.approx(0.5)
    assert early["low"] == pytest.approx(0.1) and late["high"] == pytest.approx(0.5)
