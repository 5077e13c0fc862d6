"""Checkpoints written by some ranks and read by others; a save that fails on one of them."""

import dataclasses
import errno
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from tiny_training import TINY, documents, settings
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor

from longstrand.data import Pack
from longstrand.errors import RunFailed, UserError
from longstrand.memory import Levers
from longstrand.model import load_model
from longstrand.model.parallelize import parallelize
from longstrand.parallel import by_first, make_mesh, run_ranks, together
from longstrand.state import latest_checkpoint, load_checkpoint, save_checkpoint
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.saving import Training, restore, save

ODD = dataclasses.replace(TINY, vocab_size=29)  # rows that 2, 3 and 4 ranks do not share evenly
PACKS = [Pack.from_documents(documents(length, seed=length)) for length in (11, 18)]


def _training(dtype, ranks):
    mesh = make_mesh(data=ranks, context=1, expert=1)
    model = load_model(ODD, dtype=dtype, seed=4)
    names = trained_names(model.groups(), settings())
    freeze_all_but(model, names)
    parallelize(model, mesh)
    training = Training.__new__(Training)  # without data
    training.model, training.optimizer = model, Optimizer(model, names, settings(), mesh=mesh)
    return training


def _step(training):
    """Every rank takes the same packs, and as much of their gradient as makes one of all."""
    loss, share = 0.0, 1 / training.optimizer.mesh.world.size
    for pack in PACKS:
        clipped = dataclasses.replace(pack, tokens=pack.tokens % 29, targets=pack.targets % 29)
        part = -(training.model.token_logprobs(clipped, Levers(tile=64)).double() * clipped.weight).sum()
        (share * part).backward()
        loss += float(part.detach())
    training.optimizer.step(1e-2)
    training.optimizer.clear_gradients()
    return loss


def _whole(tensors):
    return {
        name: tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


def _save(run, dtype, ranks):
    training = _training(dtype, ranks)
    _step(training)
    world = training.optimizer.mesh.world
    save_checkpoint(run, 1, training.tensors(), {"rank": world.rank}, world)
    return _whole(training.tensors())


def _resume(run, dtype, ranks):
    training = _training(dtype, ranks)
    world = training.optimizer.mesh.world
    folder = by_first(world, lambda: latest_checkpoint(run))
    trainer = load_checkpoint(folder, training.tensors(), world=world)
    training.optimizer.continue_from(1)
    return trainer, _whole(training.tensors()), [_step(training) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_four_ranks_save_any_number_of_ranks_goes_on_from(tmp_path, dtype):
    saved = run_ranks(4, _save, tmp_path, dtype, 4, start="fork", timeout=200)[0]
    trainer, alone, losses = _resume(tmp_path, dtype, 1)
    assert trainer == {"step": 1, "rank": 0}
    _bits_are_equal(alone, saved)
    for ranks in (2, 3):
        for trainer, found, more in run_ranks(
            ranks, _resume, tmp_path, dtype, ranks, start="fork", timeout=200
        ):
            assert trainer == {"step": 1, "rank": 0}
            _bits_are_equal(found, saved)
            assert more == pytest.approx(losses, rel=1e-9 if dtype == torch.float64 else 3e-3)


def test_what_one_process_saves_three_ranks_read(tmp_path):
    saved = _save(tmp_path, torch.float64, 1)
    for _, found, _ in run_ranks(3, _resume, tmp_path, torch.float64, 3, start="fork", timeout=200):
        _bits_are_equal(found, saved)


def _bits_are_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def _save_twice(run, fails):
    training = _training(torch.float64, 3)
    world = training.optimizer.mesh.world
    save_checkpoint(run, 1, training.tensors(), {}, world)
    if world.rank == 1:
        filesystem.FileSystemWriter.write_data = fails
    save_checkpoint(run, 2, training.tensors(), {}, world)


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _caught(run):
    try:
        _save_twice(run, _full)
    except RunFailed as error:
        return str(error), error.said_by_another


def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all(tmp_path):
    for rank, (message, said) in enumerate(run_ranks(3, _caught, tmp_path, start="fork", timeout=200)):
        assert said == (rank > 0)
        assert "the checkpoint of step 2 cannot be written (No space left on device)" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert latest_checkpoint(tmp_path).name == "step_000001"


def test_a_rank_killed_while_it_saves_leaves_the_older_checkpoint_the_newest(tmp_path):
    with pytest.raises(RunFailed, match=r"rank 1 of 3 was killed by SIGKILL"):
        run_ranks(3, _save_twice, tmp_path, _killed, start="fork", timeout=200)
    assert latest_checkpoint(tmp_path).name == "step_000001"


def _other_shape(run):
    training = _training(torch.float64, 2)
    world = training.optimizer.mesh.world
    save_checkpoint(run, 1, training.tensors(), {}, world)
    tensors = dict(training.tensors())
    if world.rank == 1:
        tensors["model.norm.weight"] = torch.zeros(3)
    load_checkpoint(run / "checkpoints/step_000001", tensors, world=world)


def test_a_rank_that_cannot_load_ends_all_with_its_words(tmp_path):
    with pytest.raises(UserError, match=r"model.norm.weight has shape \[16\], this model needs \[3\]"):
        run_ranks(2, _other_shape, tmp_path, start="fork", timeout=200)


def _agree(kind):
    world = make_mesh(data=2, context=1, expert=1).world
    caught = None
    try:
        with together(world):
            if world.rank == 1:
                raise kind("no such thing")
    except (UserError, OSError, RuntimeError) as error:
        caught = type(error), str(error)
    return caught, by_first(world, lambda: world.rank)


@pytest.mark.parametrize(
    ("kind", "of_the_other"),
    [(UserError, (UserError, "no such thing")), (OSError, (RuntimeError, "rank 1: no such thing"))],
)
def test_the_error_of_one_rank_is_one_on_all(kind, of_the_other):
    (first, zero), (second, also_zero) = run_ranks(2, _agree, kind, start="fork", timeout=100)
    assert first == of_the_other
    assert second == (kind, "no such thing")
    assert zero == also_zero == 0


def _run_of(ranks):
    """A run without data: its loader counts the steps of the first rank only."""
    training = _training(torch.float64, ranks)
    first = training.optimizer.mesh.first
    loader = SimpleNamespace(at=0)
    loader.state_dict = lambda: {"at": loader.at if first else -1}
    loader.load_state_dict = lambda state: setattr(loader, "at", state["at"])
    ledger = SimpleNamespace(as_dict=lambda: {"first": first})
    training.loader, training.data = loader, SimpleNamespace(ledger=ledger)
    return training


def _save_run(run):
    training = _run_of(2)
    for training.step in (1, 2, 3):
        training.loader.at = training.step
        torch.manual_seed(training.optimizer.mesh.world.rank + 10 * training.step)
        save(run, training, keep=2)


def _restore_run(run):
    training = _run_of(3)
    torch.manual_seed(training.optimizer.mesh.world.rank)
    restore(run, training, steps=5)
    return training.step, training.loader.at, torch.rand(1).item()


def test_a_run_goes_on_from_the_newest_whole_checkpoint_on_all_ranks(tmp_path):
    run_ranks(2, _save_run, tmp_path, start="fork", timeout=200)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000003",
    ]
    assert json.loads((tmp_path / "data.json").read_text()) == {"first": True}
    (tmp_path / "checkpoints/step_000003/manifest.json").unlink()
    (tmp_path / "checkpoints/.saving_step_000004").mkdir()
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    torch.manual_seed(20)
    expected = 2, 2, torch.rand(1).item()
    assert run_ranks(3, _restore_run, tmp_path, start="fork", timeout=200) == [expected] * 3
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["broken_step_000003", "step_000002"]
