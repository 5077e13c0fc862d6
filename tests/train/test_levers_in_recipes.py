"""Memory levers in a run: the same run bit by bit, refused where they cannot help, and nothing left on the disk."""

import errno
import json
import logging
import os

import pytest
import torch
from tiny_runs import checkpoints, recipe_in, signal_at_step

from longstrand.bench._small_models import model, pack
from longstrand.bench.crash import differences
from longstrand.config import load_recipe
from longstrand.errors import RunFailed, UserError
from longstrand.memory import levers_of, store
from longstrand.model.parallelize import parallelize
from longstrand.parallel import make_mesh, run_ranks
from longstrand.train import levers as checked
from longstrand.train.dry_run import check
from longstrand.train.sft import train
from longstrand.train.signals import Stopped

DISK = ("memory.tile=40", "memory.offload=disk", "memory.keep_every=2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of three steps of four layers without levers."""
    folder = tmp_path_factory.mktemp("plain")
    recipe = recipe_in(folder, "train.steps=3", "memory.tile=40")
    config = json.loads((folder / "tiny.json").read_text())
    kinds = ["linear_attention", "indexed_attention"]
    layers = {"num_hidden_layers": 4, "layer_types": kinds * 2, "indexer_types": ["full"] * 4}
    layers["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    (folder / "tiny.json").write_text(json.dumps(config | layers))
    return train(recipe)


def spools(folder):
    return [*folder.rglob("*.spool")]


def with_disk(plain, tmp_path, *overrides):
    return load_recipe(plain / "run.toml", [f"run.out={tmp_path / 'run'}", *DISK, *overrides])


def test_a_run_with_a_spool_and_layers_run_again_is_the_run_without(plain, tmp_path):
    run = train(with_disk(plain, tmp_path))
    assert differences(plain, run) == []
    assert not (run / "spool").exists()
    assert f"to its spool in {run / 'spool'}" in (run / "log.txt").read_text()


def test_a_stopped_run_leaves_no_spool_and_goes_on_with_one_elsewhere(plain, tmp_path, monkeypatch):
    recipe = with_disk(plain, tmp_path)
    with monkeypatch.context() as patch:
        signal_at_step(patch, 2)
        with pytest.raises(Stopped):
            train(recipe)
    assert spools(tmp_path) == []
    elsewhere = with_disk(plain, tmp_path, f"memory.spool={tmp_path / 'other'}")
    assert differences(plain, train(elsewhere, resume=True)) == []
    assert spools(tmp_path) == []


def test_a_disk_that_fills_up_in_the_middle_of_a_step_ends_the_run_which_can_be_resumed(
    plain, tmp_path, monkeypatch
):
    recipe, written, write = with_disk(plain, tmp_path, "evaluate.before=false"), [], os.pwritev

    def fills_up(*arguments):
        written.append(arguments)
        if len(checkpoints(tmp_path / "run") if (tmp_path / "run/checkpoints").exists() else []) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fills_up)
        with pytest.raises(RunFailed, match=r"cannot be allocated|cannot be written") as raised:
            train(recipe)
    assert written and "No space left on device" in str(raised.value) and "--resume" in str(raised.value)
    assert checkpoints(tmp_path / "run") == ["step_000001"]
    assert spools(tmp_path) == []
    train(recipe, resume=True)
    assert checkpoints(tmp_path / "run")[-1] == "step_000003"


def test_the_spool_of_a_killed_run_is_removed_when_it_is_resumed(plain, tmp_path, monkeypatch, caplog):
    recipe = with_disk(plain, tmp_path)
    with monkeypatch.context() as patch:
        signal_at_step(patch, 2)
        with pytest.raises(Stopped):
            train(recipe)
    stale = tmp_path / "run" / "spool" / "longstrand-1-0.spool"
    stale.parent.mkdir()
    stale.write_bytes(b"x" * 8192)
    with caplog.at_level(logging.WARNING):
        train(recipe, resume=True)
    assert "removed 1 spool of killed runs and freed 8,192 bytes" in caplog.text
    assert spools(tmp_path) == []


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["memory.keep_every=9"], "memory.keep_every = 9: this model has 4 layers; set it to 2 (2 streams)"),
        (
            ["memory.keep_every=3"],
            "memory.keep_every = 3: a pass then has 3 streams at once, and 3 without it; set it to 2 (2 streams)",
        ),
        (["memory.offload=host"], 'memory.offload = "host": the model is on the CPU'),
        (["memory.optimizer=host"], 'memory.optimizer = "host": the model is on the CPU'),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_lever_that_cannot_help_is_refused_before_anything_is_written(
    plain, tmp_path, overrides, words, dry_run
):
    recipe = load_recipe(plain / "run.toml", [f"run.out={tmp_path / 'run'}", *overrides])
    with pytest.raises(UserError) as raised:
        (check if dry_run else train)(recipe)
    assert words in str(raised.value)
    assert not (tmp_path / "run" / "run.toml").exists()


def test_a_spool_without_a_disk_that_it_is_for_is_refused(plain):
    with pytest.raises(
        UserError, match=r'spool = "x": offload = "none" writes no file; set offload = "disk"'
    ):
        load_recipe(plain / "run.toml", ["memory.spool=x"])


def test_a_spool_that_the_disk_has_no_room_for_is_refused_in_a_dry_run(plain, tmp_path, monkeypatch):
    plain_statvfs = os.statvfs

    def full(path):
        found = list(plain_statvfs(path))
        found[4] = 3  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(
        RunFailed, match=r"memory.spool = .*/run/spool: a pass needs [0-9,]+ bytes there, and"
    ):
        check(with_disk(plain, tmp_path))


def test_a_resumed_run_keeps_its_levers_as_it_keeps_its_tile(plain):
    for override in ("memory.keep_every=2", "memory.tile=41", "memory.offload=disk"):
        recipe = load_recipe(plain / "run.toml", [override])
        with pytest.raises(UserError, match=r"this run began with .*memory.spool, run.out, train.steps"):
            train(recipe, resume=True)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["memory.keep_fronts=true"], "with parallel.context = 1 a layer takes each tile once"),
        (
            ["memory.keep_fronts=true", "memory.recompute=false", "parallel.context=2"],
            "keep_every, offload and keep_fronts would save nothing",
        ),
    ],
)
def test_fronts_that_nothing_would_need_are_refused(tmp_path, overrides, says):
    with pytest.raises(UserError, match=says):
        recipe_in(tmp_path, *overrides)


def _statvfs_with(free, plain=os.statvfs):
    def statvfs(path):
        found = list(plain(path))
        found[1], found[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(found)

    return statvfs


def _spools_of_a_rank(folder):
    """Bytes that the check tries and that a pass allocates; what is said where two of them have no room."""
    recipe = recipe_in(folder, "memory.offload=disk", "memory.tile=8", "data.length=61")
    trained = parallelize(model("KDK", dtype=torch.float32), make_mesh(data=1, context=2, expert=1))
    made = []
    for module in (checked, store):

        def recording(at, num_bytes, device, plain=module.Spool):
            made.append(num_bytes)
            return plain(at, num_bytes, device)

        module.Spool = recording
    checked.check_spool(recipe, trained)
    levers = levers_of(recipe.memory, recipe.run.out)
    trained.token_logprobs(pack((61,)), levers=levers).sum().backward()
    os.statvfs = _statvfs_with(made[0] * 2 - 1)
    with pytest.raises(RunFailed) as raised:
        checked.check_spool(recipe, trained)
    return made, str(raised.value)


def test_ranks_ask_for_the_spools_that_they_write_and_for_room_for_all_of_them(tmp_path):
    recipe_in(tmp_path)
    ranks = run_ranks(2, _spools_of_a_rank, tmp_path, start="fork", timeout=60)
    whole = 0
    for made, said in ranks:
        tried, allocated = made
        assert tried == allocated
        assert f"the 2 ranks here need {sum(each[0] for each, _ in ranks):,} bytes there" in said
        whole += tried
    assert whole > 61 * 3 * 4 * 16 * 4  # three streams of 4 x 16 float32 values: one more than on one process
