"""A run from its recipe to its last file: stopped and resumed, reproduced, refused."""

import json
import logging
import math
import os
import re
import shutil
import signal

import pytest
import torch
from tiny_runs import checkpoints, metrics, recipe_in, signal_at_step

from longstrand.bench.crash import differences
from longstrand.config import load_recipe
from longstrand.data import Pack
from longstrand.errors import CheckFailed, UserError
from longstrand.parallel import one_process
from longstrand.series import read_series
from longstrand.state import load_checkpoint
from longstrand.train import sft
from longstrand.train.dry_run import check
from longstrand.train.schedule import learning_rate
from longstrand.train.sft import train
from longstrand.train.signals import Stopped


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of five steps that nothing stopped."""
    folder = tmp_path_factory.mktemp("finished")
    return train(recipe_in(folder))


def _copy(finished, tmp_path):
    """The finished run's inputs and folder, free to change."""
    for name in ("random.fa", "tiny.json"):
        shutil.copy(finished.parent / name, tmp_path / name)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def _resume(run, *overrides):
    return train(load_recipe(run / "run.toml", [f"run.out={run}", *overrides]), resume=True)


def test_a_run_leaves_all_its_files(finished):
    recipe = load_recipe(finished / "run.toml")
    assert checkpoints(finished) == ["step_000003", "step_000005"]
    assert [line["step"] for line in metrics(finished)] == [1, 2, 3, 4, 5]
    for line in metrics(finished):
        assert line["lr"] == learning_rate(recipe.train, line["step"])
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["peak_memory_bytes"] > 50 * 2**20
    assert metrics(finished)[-1]["remaining_seconds"] == 0
    served = json.loads((finished / "data.json").read_text())["sources"][0]["shown_in_training"]
    assert served["tokens"] == sum(line["tokens"] for line in metrics(finished))
    assert served["trained"] == sum(line["targets"] for line in metrics(finished))
    forms = json.loads((finished / "kernels.json").read_text())
    assert [number for group in forms["layers"] for number in group["layers"]][-1] == "head"
    assert {"kda", "sparse_attention", "mhc_gather"} <= {op["op"] for g in forms["layers"] for op in g["ops"]}
    log = (finished / "log.txt").read_text()
    assert "done: 5 steps" in log
    assert f"CPU kernels: {load_recipe(finished / 'run.toml').kernels.cpu} (" in log


def test_the_loss_of_the_first_step_is_that_of_the_drawn_model(finished):
    recipe = load_recipe(finished / "run.toml")
    training = sft.prepare(recipe)
    packs = training.loader.next_step()
    with torch.no_grad():
        nats = sum(-(training.model.token_logprobs(p) * p.weight).double().sum() for p in packs)
    assert metrics(finished)[0]["loss"] == pytest.approx(
        float(nats / sum(p.weight.sum() for p in packs)), rel=1e-6
    )


def test_evaluations_stand_at_the_first_and_the_last_step(finished):
    series = read_series(finished / "evaluate.json")
    assert [(one["name"], one["step"], one["sequences"]) for one in series] == [
        ("before", 0, 2),
        ("after", 5, 2),
    ]
    assert series[0]["nats"] > series[1]["nats"] > math.log(4) * 0.9


def test_running_run_toml_again_reproduces_the_run(finished, tmp_path):
    again = train(load_recipe(finished / "run.toml", [f"run.out={tmp_path / 'again'}"]))
    assert differences(finished, again) == []


def test_another_seed_is_another_run(finished, tmp_path):
    other = train(load_recipe(finished / "run.toml", [f"run.out={tmp_path / 'other'}", "run.seed=1"]))
    found = differences(finished, other)
    assert {"model.lm_head.weight", "optimizer.exp_avg.lm_head.weight", "metrics.jsonl"} <= set(found)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_and_saves_and_the_resumed_run_is_as_if_never_stopped(
    finished, tmp_path, monkeypatch, number, code
):
    recipe = load_recipe(finished / "run.toml", [f"run.out={tmp_path / 'run'}"])
    before = signal.getsignal(number)  # a background job's shell may have SIGINT ignored
    with monkeypatch.context() as patch:
        signal_at_step(patch, 2, number)
        with pytest.raises(Stopped) as caught:
            train(recipe)
    assert caught.value.exit_code == code
    assert str(caught.value) == (
        f"stopped by {number.name}: step 2 of 5 is saved; "
        f"go on with longstrand train {tmp_path / 'run' / 'run.toml'} --resume"
    )
    assert checkpoints(tmp_path / "run") == ["step_000001", "step_000002"]
    assert signal.getsignal(number) == before
    train(recipe, resume=True)
    assert differences(finished, tmp_path / "run") == []


def test_a_bfloat16_run_with_masters_resumes_bit_for_bit(tmp_path, monkeypatch):
    straight = train(recipe_in(tmp_path, "run.dtype=bfloat16", "train.steps=3"))
    recipe = recipe_in(tmp_path, "run.dtype=bfloat16", "train.steps=3", out="stopped")
    signal_at_step(monkeypatch, 2)
    with pytest.raises(Stopped):
        train(recipe)
    train(recipe, resume=True)
    assert differences(straight, tmp_path / "stopped") == []


def test_a_resumed_run_may_have_more_steps(tmp_path):
    constant = ("train.schedule=constant",)
    straight = train(recipe_in(tmp_path, *constant, "train.steps=4"))
    shorter = train(recipe_in(tmp_path, *constant, "train.steps=2", out="longer"))
    _resume(shorter, "train.steps=4")
    assert differences(straight, shorter) == ["evaluate.json"]
    steps = [one["step"] for one in read_series(shorter / "evaluate.json") if one["name"] == "after"]
    assert steps == [2, 4]


def test_resuming_a_finished_run_changes_nothing(finished, tmp_path):
    run = _copy(finished, tmp_path)
    before = (run / "evaluate.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    _resume(run)
    assert ((run / "evaluate.json").read_bytes(), (run / "metrics.jsonl").read_bytes()) == before


def test_resume_begins_a_run_where_there_is_none(tmp_path):
    run = train(recipe_in(tmp_path, "train.steps=1"), resume=True)
    assert checkpoints(run) == ["step_000001"]


def test_resume_skips_a_broken_checkpoint_keeps_it_aside_and_ends_the_same(finished, tmp_path):
    run = _copy(finished, tmp_path)
    data = run / "checkpoints/step_000005/trainer.json"
    data.write_text(data.read_text()[:-1])
    _resume(run)
    assert differences(finished, run) == []
    assert checkpoints(run) == ["broken_step_000005", "step_000003", "step_000005"]
    log = (run / "log.txt").read_text()
    assert re.search(
        r"skipped a broken checkpoint: .*step_000005: trainer.json has \d+ bytes, must have \d+", log
    )
    assert "going on from step_000003; 2 lines of metrics.jsonl after it were cut" in log


def test_torn_and_late_lines_of_metrics_are_cut(finished, tmp_path):
    run = _copy(finished, tmp_path)
    shutil.rmtree(run / "checkpoints/step_000005")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    _resume(run)
    assert differences(finished, run) == []
    assert "3 lines of metrics.jsonl after it were cut" in (run / "log.txt").read_text()


def test_lines_missing_from_metrics_are_counted(finished, tmp_path):
    run = _copy(finished, tmp_path)
    (run / "metrics.jsonl").unlink()
    _resume(run)
    assert "metrics.jsonl lacks 5 of the 5 lines up to here" in (run / "log.txt").read_text()


def test_a_kill_between_a_checkpoint_and_its_ledger_is_made_good(finished, tmp_path):
    run = _copy(finished, tmp_path)
    (run / "data.json").write_text(
        (run / "data.json").read_text().replace('"sequences": 10', '"sequences": 6')
    )
    assert differences(finished, run) == ["data.json"]
    _resume(run)
    assert differences(finished, run) == []


def test_leftovers_of_a_killed_run_are_removed_and_counted(finished, tmp_path):
    run = _copy(finished, tmp_path)
    shutil.copytree(run / "checkpoints/step_000005", run / "checkpoints/.saving_step_000008")
    _resume(run)
    assert "removed 1 unfinished checkpoint folders" in (run / "log.txt").read_text()
    assert checkpoints(run) == ["step_000003", "step_000005"]


@pytest.mark.parametrize("before", ["no folder", "no checkpoint"])
def test_a_resumed_run_with_nothing_to_go_on_from_begins_and_says_so(finished, tmp_path, capsys, before):
    run = tmp_path / "run"
    if before == "no folder":
        train(recipe_in(tmp_path), resume=True)
    else:
        _copy(finished, tmp_path)
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints/step_000005_old").mkdir(parents=True)  # not the name of a checkpoint
        _resume(run)
    cut = "" if before == "no folder" else "; 5 lines of metrics.jsonl were cut"
    said = f"--resume: run.out = {run} holds no checkpoint to go on from: it begins at step 0{cut}\n"
    assert f"warning: {said}" in capsys.readouterr().err
    assert (run / "log.txt").read_text().count(f"WARNING {said}") == 1
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5]


def test_a_run_that_is_not_to_be_resumed_has_no_word_of_it(finished):
    assert "--resume" not in (finished / "log.txt").read_text()


def test_a_dry_run_says_what_would_run_and_makes_no_folder(tmp_path, capsys):
    recipe = recipe_in(tmp_path)
    check(recipe)
    assert not (tmp_path / "run").exists()
    said = capsys.readouterr().err
    assert re.search(r"([\d,]+) parameters, \1 of them trained; 5 steps of 2 sequences of 128 tokens", said)
    assert re.search(r"a checkpoint takes \d\.\d MB", said)


def test_plain_lines_name_loss_speed_memory_and_remaining_time(tmp_path, capsys):
    train(recipe_in(tmp_path, "train.steps=2"))
    said = capsys.readouterr().err
    assert re.search(r"step 1/2  loss \d\.\d{4}  [\d,]+ tokens/s  peak \d\.\d\d GiB  \d+:\d\d left", said)
    assert re.search(r"step 2/2  loss .* 0:00 left", said)
    assert "\x1b" not in said


def test_a_step_without_targets_is_in_the_metrics_and_moves_nothing(tmp_path, monkeypatch, caplog):
    plain = sft.open_data

    def open_data(*arguments, **options):
        data = plain(*arguments, **options)
        loader = data.train_loader(1)
        served = loader.next_step

        def next_step():
            packs = served()
            if loader.step != 2:
                return packs
            return [Pack(p.tokens, p.targets, torch.zeros_like(p.weight), p.starts) for p in packs]

        loader.next_step = next_step
        data.train_loader = lambda _: loader
        return data

    monkeypatch.setattr(sft, "open_data", open_data)
    with caplog.at_level(logging.WARNING):
        run = train(recipe_in(tmp_path, "train.steps=2", "train.save_every=1"))
    assert (metrics(run)[1]["loss"], metrics(run)[1]["targets"]) == (None, 0)
    assert "step 2: no target in 1 sequences; the weights stay as they are" in caplog.text
    recipe = load_recipe(run / "run.toml")
    held = sft.spread(recipe, sft.prepare(recipe), one_process()).tensors()
    updates = [load_checkpoint(run / "checkpoints/step_000001", held)["updates"]]
    first = {name: tensor.clone() for name, tensor in held.items()}
    updates.append(load_checkpoint(run / "checkpoints/step_000002", held)["updates"])
    assert updates == [1, 1]
    assert all(torch.equal(tensor, first[name]) for name, tensor in held.items())


def test_what_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    plain = sft.take_step

    def take_step(model, *arguments, **options):
        if options["step"] == 3:
            with torch.no_grad():
                model.norm.weight.fill_(float("nan"))
        return plain(model, *arguments, **options)

    monkeypatch.setattr(sft, "take_step", take_step)
    with pytest.raises(CheckFailed, match=r"step 3: the loss of sequence 1 of 2 is nan") as caught:
        train(recipe_in(tmp_path, "train.save_every=1"))
    assert caught.value.exit_code == 3
    assert checkpoints(tmp_path / "run") == ["step_000001", "step_000002"]
    assert len(metrics(tmp_path / "run")) == 2


def test_a_signal_during_an_evaluation_leaves_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sft, "evaluate_once", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped, match=r"stopped by SIGINT: no step was taken; go on with longstrand train"):
        train(recipe_in(tmp_path))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_tensorboard_holds_what_the_metrics_hold_also_after_going_back_to_a_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(recipe_in(tmp_path, "train.steps=2", 'run.sinks=["tensorboard"]', "evaluate.before=false"))
    shutil.rmtree(run / "checkpoints/step_000002")
    _resume(run)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert "step" not in events.Tags()["scalars"]
    for name in ("loss", "grad_norm", "lr", "peak_memory_bytes"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in metrics(run)]


def test_nothing_to_evaluate_is_said(tmp_path, caplog):
    folder = recipe_in(tmp_path)  # writes the inputs
    text = (tmp_path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(re.sub(r"split = .*", "", text))
    assert folder.data.split is not None
    with caplog.at_level(logging.WARNING):
        run = train(recipe_in(tmp_path, "train.steps=1"))
    assert "nothing is evaluated: the recipe has neither [data.split] nor evaluate.sources" in caplog.text
    assert not (run / "evaluate.json").exists()


def test_a_vocabulary_that_is_too_small_is_refused_before_any_step(tmp_path):
    recipe = recipe_in(tmp_path)
    config = json.loads((tmp_path / "tiny.json").read_text())
    (tmp_path / "tiny.json").write_text(json.dumps(config | {"vocab_size": 64}))
    with pytest.raises(UserError, match=r"gives token \d+, and the model's vocabulary has 64"):
        train(recipe)
    assert not (tmp_path / "run/run.toml").exists()


@pytest.mark.parametrize(
    "config, override, message",
    [
        (
            {"mlp_layer_types": ["dense", "dense"]},
            "train.balance=bias",
            r'balance = "bias": this model has no router',
        ),
        (
            {"layer_types": ["linear_attention", "linear_attention"]},
            "train.indexer=sparse",
            r'indexer = "sparse": this model has no indexer',
        ),
    ],
    ids=["balance without experts", "indexer without sparse attention"],
)
def test_a_setting_that_this_model_has_no_part_for_is_refused(config, override, message, tmp_path):
    recipe = recipe_in(tmp_path, override)
    shape = json.loads((tmp_path / "tiny.json").read_text())
    (tmp_path / "tiny.json").write_text(json.dumps(shape | config))
    with pytest.raises(UserError, match=message):
        train(recipe)
    assert not (tmp_path / "run/run.toml").exists()
