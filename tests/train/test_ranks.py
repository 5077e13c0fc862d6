"""A run on several ranks is the run on one: same losses, same weights, same files, and an end for all at once."""

import dataclasses
import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import checkpoints, metrics, recipe_in, signal_at_step
from tiny_training import TINY, documents, optimizer_of, packs, settings, tiny_model, weights

from longstrand import evaluate
from longstrand.config import ModelSection
from longstrand.data import Pack
from longstrand.errors import CheckFailed, RunFailed, UserError
from longstrand.memory import Levers
from longstrand.memory.spool import Spool, remove_stale_spools
from longstrand.model import load_model, parallelize, save_model
from longstrand.model.hf.files import WeightFiles
from longstrand.parallel import all_ranks, from_all, make_mesh, one_process, run_ranks
from longstrand.state import load_checkpoint
from longstrand.train import sft
from longstrand.train.sft import train
from longstrand.train.signals import Stopped
from longstrand.train.step import take_step

NOT_COMPARED = {"seconds", "cpu_seconds", "tokens_per_second", "peak_memory_bytes", "remaining_seconds"}


def _uneven():
    """Five packs of very unequal numbers of targets, one of them without any."""
    (masked,) = documents(9, seed=5)
    return [*packs(33, 2, 18), Pack.from_documents([masked], [torch.zeros(9)]), *packs(7, seed=3)]


def _two_steps(data, options, context=1, expert=1):
    train = settings(**options)
    model = tiny_model()
    optimizer = optimizer_of(model, train, make_mesh(data=data, context=context, expert=expert))
    results = [
        take_step(model, _uneven(), optimizer, train, step=step, levers=Levers(tile=16)) for step in (1, 2)
    ]
    return results, optimizer.seen[0], weights(model)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ((2, 1, 1), {"balance": "aux", "balance_rate": 0.5}),
        ((1, 2, 2), {"balance": "bias", "indexer": "sparse"}),
        ((2, 2, 1), {"clip": 0.1}),
    ],
)
def test_steps_on_ranks_are_the_steps_of_one_process(options, axes):
    data, *others = axes
    results, gradients, moved = _two_steps(1, options)
    ranks = run_ranks(data * others[0], _two_steps, data, options, *others, start="fork", timeout=200)
    for others, other_gradients, other_moved in ranks:
        for one, other in zip(results, others, strict=True):
            assert vars(other) == {name: v and pytest.approx(v, rel=1e-10) for name, v in vars(one).items()}
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-9, atol=1e-12)
        for name, tensor in moved.items():
            torch.testing.assert_close(other_moved[name], tensor, rtol=0, atol=1e-10)
    assert all(torch.equal(ranks[0][2][name], ranks[1][2][name]) for name in moved)


def _step_with_a_bad_pack(num_packs):
    model, train, mesh = tiny_model(), settings(), make_mesh(data=2, context=1, expert=1)
    optimizer = optimizer_of(model, train, mesh)
    before = weights(model)
    some = packs(*[20] * num_packs)
    if mesh.world.rank == 1:  # only this rank meets it
        own = model.token_logprobs
        model.token_logprobs = lambda *args, **options: own(*args, **options) * float("inf")
    try:
        take_step(model, some, optimizer, train, step=4, levers=Levers(tile=16))
    except CheckFailed as failed:
        still = all(torch.equal(weights(model)[name], tensor) for name, tensor in before.items())
        return str(failed), still and optimizer.updates == 0
    return "went on", False


def test_what_is_not_finite_on_one_rank_stops_all_before_any_weight_moves():
    for words, still in run_ranks(2, _step_with_a_bad_pack, 3, start="fork", timeout=100):
        assert words.startswith("step 4: the loss of sequence 2 of 3 (rank 1) is ")
        assert still


def _train(recipe, at=None, number=None):
    if at is not None and torch.distributed.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            signal_at_step(patch, at, number)
            return train(recipe)
    return train(recipe)


def _state(run, name="step_000005"):
    recipe = recipe_in(run.parent, "run.dtype=float64")
    held = sft.spread(recipe, sft.prepare(recipe), one_process()).tensors()
    trainer = load_checkpoint(run / "checkpoints" / name, held)
    return held, trainer


def _recipe(folder, *overrides, out):
    values = ["run.dtype=float64", "train.sequences_per_step=3", "evaluate.sequences=3"]
    return recipe_in(folder, *values, *overrides, out=out)


def test_a_run_on_ranks_writes_what_the_run_of_one_process_writes(tmp_path):
    one = train(_recipe(tmp_path, out="one"))
    ranks = run_ranks(2, _train, _recipe(tmp_path, "parallel.data=2", out="two"), start="fork", timeout=300)
    assert ranks == [tmp_path / "two"] * 2
    two = ranks[0]
    assert checkpoints(two) == checkpoints(one)
    for line, other in zip(metrics(one), metrics(two), strict=True):
        compared = {name: v for name, v in line.items() if name not in NOT_COMPARED}
        assert {name: other[name] for name in compared} == {
            name: v if isinstance(v, int) else pytest.approx(v, rel=1e-9) for name, v in compared.items()
        }
    assert json.loads((two / "data.json").read_text()) == json.loads((one / "data.json").read_text())
    (held, trainer), (other_held, other_trainer) = _state(one), _state(two)
    assert trainer == other_trainer
    for name, tensor in held.items():
        torch.testing.assert_close(other_held[name], tensor, rtol=0, atol=1e-10)
    series, others = (json.loads((run / "evaluate.json").read_text())["series"] for run in (one, two))
    assert series[0] == others[0]  # before the first step: the very same sums, in the same order
    assert [each["sequences"] for each in others] == [3, 3]
    assert others[1]["nats"] == pytest.approx(series[1]["nats"], rel=1e-9)
    assert "documents" in others[1]
    assert "done: 5 steps" in (two / "log_rank1.txt").read_text()


def test_a_signal_to_one_rank_ends_all_after_the_same_step_and_the_run_goes_on_with_other_ranks(tmp_path):
    recipe = _recipe(tmp_path, "parallel.data=2", "evaluate.before=false", out="two")
    with pytest.raises(Stopped, match=r"stopped by SIGTERM: step 2 of 5 is saved; go on with") as stopped:
        run_ranks(2, _train, recipe, 2, signal.SIGTERM, start="fork", timeout=300)
    assert stopped.value.exit_code == 143
    assert len(metrics(tmp_path / "two")) == 2
    run = train(_recipe(tmp_path, "evaluate.before=false", out="two"), resume=True)
    whole = train(_recipe(tmp_path, "evaluate.before=false", out="one"))
    for name, tensor in _state(whole)[0].items():
        torch.testing.assert_close(_state(run)[0][name], tensor, rtol=0, atol=1e-10)


def _signalled(recipe, module, name, ranks):
    """These ranks get SIGTERM when the function is first called, the other one meanwhile goes on."""
    plain, calls = getattr(module, name), []

    def function(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            processes = from_all(all_ranks(), os.getpid())
            if all_ranks().rank == 0:
                time.sleep(0.5)  # in an exchange of a pass the other one waits for this one
                for rank in ranks:
                    os.kill(processes[rank], signal.SIGTERM)
        return plain(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, function)
        return train(recipe)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (evaluate, "_logprobs", r"no step was taken; go on with longstrand train .* --resume"),
        (sft, "prepare", "no step was taken; start it again"),
        (sft, "spread", "no step was taken; start it again"),
        (parallelize, "parallelize", "no step was taken; start it again"),
    ],
    ids=["evaluate", "prepare", "spread", "loading"],
)
def test_a_signal_before_the_first_step_ends_all(tmp_path, module, name, words, ranks):
    recipe = _recipe(tmp_path, "parallel.data=2", out="two")
    with pytest.raises(Stopped, match=f"stopped by SIGTERM: {words}") as stopped:
        run_ranks(2, _signalled, recipe, module, name, ranks, start="fork", timeout=60)
    assert stopped.value.exit_code == 143
    assert not (tmp_path / "two/metrics.jsonl").exists()


def test_what_the_first_rank_refuses_all_refuse(tmp_path):
    recipe = _recipe(tmp_path, "parallel.data=2", "train.steps=1", "train.warmup_steps=0", out="two")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/run.toml").write_text("")
    with pytest.raises(UserError, match="holds a run already"):
        run_ranks(2, _train, recipe, start="fork", timeout=100)
    with pytest.raises(UserError, match=r"2 x 1: must be the number of processes, 1"):
        train(recipe)


def test_weights_that_one_rank_cannot_read_end_all(tmp_path):
    """Each rank reads by itself: where only one of them fails, its words are those of all."""
    folder = save_model(load_model(dataclasses.replace(TINY, vocab_size=256)), tmp_path / "model")
    drawn = _recipe(tmp_path, "parallel.data=2", out="two")
    recipe = drawn.model_copy(update={"model": ModelSection(path=str(folder))})
    with pytest.raises(UserError, match="holds numbers that are not finite"):
        run_ranks(2, _train_with_a_bad_file_on, 1, recipe, start="fork", timeout=100)
    assert not (tmp_path / "two/metrics.jsonl").exists()


def _train_with_a_bad_file_on(rank, recipe):
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == rank:
            patch.setattr(WeightFiles, "read", lambda *_: torch.full((1,), float("nan")))
        return train(recipe)


def _resumed(recipe):
    try:
        train(recipe, resume=True)
    except UserError as refused:
        return str(refused), refused.said_by_another


def test_a_checkpoint_beyond_the_steps_is_said_by_the_first_rank_alone(tmp_path):
    brief = ("train.steps=3", "evaluate.before=false")
    train(_recipe(tmp_path, *brief, out="two"))
    less = _recipe(tmp_path, *brief, "train.steps=2", "parallel.data=2", out="two")
    found = run_ranks(2, _resumed, less, start="fork", timeout=100)
    words = "train.steps = 2: the newest checkpoint is of step 3; set train.steps to 3 or more"
    assert found == [(words, False), (words, True)]


def _train_with_a_full_disk(recipe):
    if torch.distributed.get_rank() == 0:
        return train(recipe)
    allocate, written = os.posix_fallocate, Path(recipe.run.out) / "checkpoints" / "step_000001"

    def full(*arguments):
        if written.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        return train(recipe)


def test_a_disk_that_is_full_for_one_rank_ends_all_with_its_message(tmp_path):
    disk = ("memory.tile=40", "memory.offload=disk", "evaluate.before=false", "parallel.data=2")
    with pytest.raises(RunFailed, match=r"cannot be allocated \(No space left on device\).* --resume"):
        run_ranks(2, _train_with_a_full_disk, _recipe(tmp_path, *disk, out="two"), start="fork", timeout=200)
    assert checkpoints(tmp_path / "two") == ["step_000001"]


def _two_spools(folder):
    axis = make_mesh(data=2, context=1, expert=1).world
    spool = Spool(folder, 4096, torch.device("cpu"))  # each looks for stale ones first
    axis.total(0.0)
    freed = remove_stale_spools(folder)
    axis.total(0.0)
    there = spool.path.exists()
    spool.close()
    return freed, there


def test_a_rank_never_removes_the_spool_of_another(tmp_path):
    assert run_ranks(2, _two_spools, tmp_path, start="fork", timeout=100) == [(0, True)] * 2
    assert not [*tmp_path.iterdir()]


def test_a_killed_rank_ends_the_run_and_the_next_one_goes_on_from_the_last_checkpoint(tmp_path):
    recipe = _recipe(tmp_path, "parallel.data=2", "train.save_every=1", "evaluate.before=false", out="two")
    with pytest.raises(RunFailed, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks(2, _train, recipe, 3, signal.SIGKILL, start="fork", timeout=300)
    assert checkpoints(tmp_path / "two") == ["step_000001", "step_000002"]
    run = train(_recipe(tmp_path, "train.save_every=1", "evaluate.before=false", out="two"), resume=True)
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5]
