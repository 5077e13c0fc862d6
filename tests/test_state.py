"""Checkpoints: what is whole is picked, what is not is named, and the old one outlives a failed save."""

import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from longstrand import state
from longstrand.errors import RunFailed, UserError
from longstrand.state import (
    BrokenCheckpoint,
    check_checkpoint,
    checkpoint_bytes,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    remove_unfinished,
    save_checkpoint,
)

LOADER = {"seed": 5, "next": [3, 1]}


def _tensors():
    generator = torch.Generator().manual_seed(7)
    return {
        "model.embed.weight": torch.randn(33, 17, generator=generator),
        "model.a.b": torch.randn(5, generator=generator).bfloat16(),
        "model.gate.bias": torch.randn(3, generator=generator, dtype=torch.float64),
        "optimizer.exp_avg.embed.weight": torch.randn(33, 17, generator=generator),
    }


def _save(run, step):
    return save_checkpoint(
        run, step, {name: tensor + step for name, tensor in _tensors().items()}, {"loader": LOADER}
    )


def _names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def _data_file(folder):
    return max((folder / "state").iterdir(), key=lambda path: path.stat().st_size)


def test_what_is_loaded_is_bit_equal_to_what_was_saved(tmp_path):
    folder = _save(tmp_path, 10)
    filled = {name: torch.full_like(tensor, float("nan")) for name, tensor in _tensors().items()}
    trainer = load_checkpoint(folder, filled)
    assert folder == tmp_path / "checkpoints/step_000010"
    assert trainer == {"step": 10, "loader": LOADER}
    for name, tensor in _tensors().items():
        assert torch.equal(filled[name], tensor + 10), name


def test_the_newest_whole_checkpoint_is_picked_by_number(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 1_000_000, 10):
        _save(tmp_path, step)
    assert latest_checkpoint(tmp_path).name == "step_1000000"


def _short_by_one_byte(folder):
    path = _data_file(folder)
    os.truncate(path, path.stat().st_size - 1)


def _empty_trainer(folder):
    os.truncate(folder / "trainer.json", 0)


def _flip_a_bit(folder):
    path = _data_file(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit_manifest(**changes):
    def edit(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | changes))

    return edit


def _wrong_name(folder):
    folder.rename(folder.with_name("step_000004"))


BROKEN = {
    "never finished": (
        lambda f: (f / "manifest.json").unlink(),
        r"manifest\.json is absent; the save never finished",
    ),
    "manifest cut": (lambda f: os.truncate(f / "manifest.json", 20), r"manifest\.json is not JSON"),
    "manifest not an object": (
        lambda f: (f / "manifest.json").write_text("[]"),
        r"manifest\.json is not a JSON object",
    ),
    "other version": (_edit_manifest(version=99), r"manifest\.json has version 99, this longstrand reads 1"),
    "no files listed": (_edit_manifest(files={}), r"manifest\.json lists no files"),
    "a listed file without its size": (
        _edit_manifest(files={"trainer.json": 3}),
        r"manifest\.json has no size and SHA-256 of trainer\.json",
    ),
    "manifest nested without end": (
        lambda f: (f / "manifest.json").write_text("[" * 100_000),
        r"manifest\.json is not JSON",
    ),
    "data file removed": (lambda f: _data_file(f).unlink(), r"state/\S+ is absent"),
    "one byte short": (_short_by_one_byte, r"state/\S+ has (\d+) bytes, must have \d+; it was cut"),
    "zero length": (_empty_trainer, r"trainer\.json has 0 bytes, must have \d+"),
    "one bit flipped": (_flip_a_bit, r"state/\S+ has another SHA-256"),
    "foreign file": (
        lambda f: (f / "state/more.distcp").write_bytes(b"x"),
        r"more\.distcp is not in manifest\.json",
    ),
    "wrong name": (_wrong_name, r"holds step 3, which is not what its name says"),
}


@pytest.mark.parametrize("damage, message", BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_is_named_and_the_one_before_it_is_picked(damage, message, tmp_path, caplog):
    for step in (1, 2, 3):
        _save(tmp_path, step)
    damage(tmp_path / "checkpoints/step_000003")
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path).name == "step_000002"
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "longstrand.state"]
    assert re.search(message, warning)
    assert re.search("step_00000[34]", warning)
    assert "\n" not in warning


OTHER = {
    "absent": ({"model.new": torch.zeros(2)}, (), r"has no model\.new \(1 absent\)"),
    "unknown": ({}, ("model.a.b",), r"holds model\.a\.b, unknown here"),
    "shape": (
        {"model.a.b": torch.zeros(6).bfloat16()},
        (),
        r"model\.a\.b has shape \[5\], this model needs \[6\]",
    ),
    "dtype": ({"model.a.b": torch.zeros(5)}, (), r"model\.a\.b is bfloat16, this run needs float32"),
}


@pytest.mark.parametrize("changed, dropped, message", OTHER.values(), ids=OTHER)
def test_a_checkpoint_of_another_model_is_refused_by_tensor(changed, dropped, message, tmp_path):
    folder = _save(tmp_path, 1)
    wanted = {name: tensor for name, tensor in (_tensors() | changed).items() if name not in dropped}
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(folder, wanted)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, BrokenCheckpoint)


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        _save(tmp_path, step)
        prune_checkpoints(tmp_path, 2)
    assert _names(tmp_path) == ["step_000003", "step_000004"]


def test_a_broken_checkpoint_of_the_same_step_is_replaced(tmp_path):
    _short_by_one_byte(_save(tmp_path, 1))
    check_checkpoint(_save(tmp_path, 1))
    assert _names(tmp_path) == ["step_000001"]


def test_leftovers_of_killed_saves_and_deletions_are_removed_and_counted(tmp_path):
    _save(tmp_path, 1)
    for name in (".saving_step_000002", ".deleting_step_000000"):
        shutil.copytree(tmp_path / "checkpoints/step_000001", tmp_path / "checkpoints" / name)
    assert latest_checkpoint(tmp_path).name == "step_000001"
    assert remove_unfinished(tmp_path) == 2
    assert _names(tmp_path) == ["step_000001"]


def test_too_little_free_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    _save(tmp_path, 1)
    needed = checkpoint_bytes(_tensors())
    monkeypatch.setattr(
        state.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, needed - 1)
    )
    with pytest.raises(RunFailed, match=r"the checkpoint of step 2 needs 1\.1 MB and 1\.1 MB are free"):
        _save(tmp_path, 2)
    assert _names(tmp_path) == ["step_000001"]


def test_the_space_asked_for_covers_the_checkpoint(tmp_path):
    folder = _save(tmp_path, 1)
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert written <= checkpoint_bytes(_tensors())
    many = {f"model.{'long_name' * 8}.{i}": torch.zeros(1) for i in range(500)}
    folder = save_checkpoint(tmp_path, 2, many, {})
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert written <= checkpoint_bytes(many)


@pytest.mark.parametrize("limit_bytes", [0, 1000, 3000, 6000])
def test_a_file_size_limit_in_the_middle_of_a_save_keeps_the_old_checkpoint(limit_bytes, tmp_path):
    _save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        with pytest.raises(
            RunFailed, match=r"the checkpoint of step 2 cannot be written .*File too large"
        ) as caught:
            _save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert _names(tmp_path) == ["step_000001"]
    check_checkpoint(tmp_path / "checkpoints/step_000001")


def test_a_full_disk_in_the_middle_of_a_save_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        monkeypatch.setattr(state, "require_space", lambda *_: None)
        _save(disk, 1)
        with pytest.raises(RunFailed, match="No space left on device") as caught:
            for step in range(2, 20):
                _save(disk, step)
        assert "\n" not in str(caught.value)
        kept = _names(disk)
        assert kept[0] == "step_000001" and all(name.startswith("step_") for name in kept)
        for name in kept:
            check_checkpoint(disk / "checkpoints" / name)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_in_place_of_the_checkpoints_folder_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        RunFailed, match=r"checkpoints: the checkpoint of step 1 cannot be written \(File exists\)"
    ):
        _save(tmp_path, 1)


KILLED = """
import sys, torch
from pathlib import Path
from longstrand.state import save_checkpoint
tensors = {f"model.{i}": torch.full((64, 64), float(i)) for i in range(40)}
for step in range(2, 10**6):
    save_checkpoint(Path(sys.argv[1]), 1 + step % 2, tensors, {"loader": {}})
    print(step, flush=True)
"""


def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    for kill_number in range(3):
        saver = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2 + kill_number):
            saver.stdout.readline()
        saver.kill()
        saver.wait()
        remove_unfinished(tmp_path)
        assert latest_checkpoint(tmp_path) is not None
