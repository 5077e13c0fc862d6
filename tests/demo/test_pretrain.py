"""The curriculum: its recipes hold together, and a stopped one goes on where it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from longstrand.data import open_data
from longstrand.demo import pretrain as curriculum
from longstrand.demo.kin import Kin, generate
from longstrand.demo.pretrain import Stage, recipe_of, stages, write_sequences
from longstrand.model import load_model


@pytest.fixture
def tiny_stage() -> Stage:
    train = {"steps": 2, "sequences_per_step": 1, "lr": 1e-3, "warmup_steps": 1, "indexer": "sparse"}
    return Stage("1_tiny", Kin(length=64, unit=(10, 20)), train, pack=128, sequences=4, seed=5)


def test_a_stage_shows_each_generated_sequence_once(tiny_stage: Stage, tmp_path: Path):
    write_sequences(tiny_stage, tmp_path / "1_tiny" / "sequences.fa")
    recipe = recipe_of(tiny_stage, tmp_path, None)
    loader = open_data(recipe.data, seed=5).train_loader(1)
    shown = [bytes(p.tokens.tolist()) for _ in range(2) for p in loader.next_step()]
    documents = sorted(pack[at : at + 64] for pack in shown for at in (0, 64))
    assert documents == sorted(generate(tiny_stage.kin, 5, n)[0].tobytes() for n in range(4))


def test_the_stages_build_on_each_other(tiny_stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    second = dataclasses.replace(tiny_stage, name="2_tiny", seed=6)
    monkeypatch.setattr(curriculum, "stages", lambda: [tiny_stage, second])
    final = curriculum.pretrain(tmp_path)
    first_weights = load_model(tmp_path / "1_tiny" / "weights").state_dict()
    last_weights = load_model(final).state_dict()
    assert any(not torch.equal(first_weights[name], last_weights[name]) for name in last_weights)

    written = (tmp_path / "1_tiny" / "run" / "metrics.jsonl").read_bytes()
    curriculum.pretrain(tmp_path)  # all is there: nothing is trained again
    assert (tmp_path / "1_tiny" / "run" / "metrics.jsonl").read_bytes() == written


def test_every_shipped_stage_is_a_valid_recipe(tmp_path: Path):
    before: Path | None = None
    for stage in stages():
        recipe = recipe_of(stage, tmp_path, before)
        assert stage.pack % stage.kin.length == 0
        assert recipe.train.steps * stage.pack <= stage.sequences * stage.kin.length
        before = tmp_path
