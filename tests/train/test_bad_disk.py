"""Bad run folders, disks and checkpoints: each ends in one line that names it, and the last good state stays."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest
from tiny_runs import checkpoints, metrics, recipe_in

from longstrand import state
from longstrand.bench.crash import differences
from longstrand.config import load_recipe
from longstrand.errors import LongstrandError
from longstrand.train.sft import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(recipe_in(tmp_path_factory.mktemp("finished"), "train.save_every=2"))


@pytest.fixture
def run(finished, tmp_path):
    """The finished run's inputs and folder, free to break."""
    for name in ("random.fa", "tiny.json", "recipe.toml"):
        shutil.copy(finished.parent / name, tmp_path / name)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def _resume(run, *overrides):
    return train(load_recipe(run / "run.toml", [f"run.out={run}", *overrides]), resume=True)


def _start_again(run, *overrides):
    return train(load_recipe(run / "run.toml", [f"run.out={run}", *overrides]))


def _refusal(action, *arguments):
    with pytest.raises(LongstrandError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.exit_code


def test_a_used_folder_is_refused_with_the_command_that_goes_on(run):
    message, code = _refusal(_start_again, run)
    assert (
        f"run.out = {run}: holds a run already; go on with longstrand train {run}/run.toml --resume"
        in message
    )
    assert code == 2


def test_the_command_of_a_folder_with_blanks_can_be_pasted(finished, tmp_path):
    folder = tmp_path / "my runs"
    shutil.copytree(finished, folder)
    message, _ = _refusal(_start_again, folder)
    assert f"longstrand train '{folder}/run.toml' --resume" in message


def _foreign(run):
    shutil.rmtree(run)
    run.mkdir()
    (run / "thesis.tex").write_text("")


def _file(run):
    shutil.rmtree(run)
    run.write_text("")


def _under_a_file(run):
    shutil.rmtree(run)
    run.write_text("")
    return {"out": run / "inner"}


def _broken_toml(run):
    (run / "run.toml").write_text("[run\n")


def _no_checkpoint_is_whole(run):
    for path in run.glob("checkpoints/step_*/manifest.json"):
        path.unlink()


def _binary_metrics(run):
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")


def _odd_line_in_metrics(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "[]", *lines[1:]]) + "\n")


def _metrics_is_a_folder(run):
    shutil.rmtree(run / "checkpoints/step_000005")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def _log_is_a_folder(run):
    (run / "log.txt").unlink()
    (run / "log.txt").mkdir()


def _broken_evaluation(run):
    (run / "evaluate.json").write_text("{")


def _lock_is_a_folder(run):
    (run / ".lock").unlink()
    (run / ".lock").mkdir()


def _changed_data(run):
    path = run.parent / "random.fa"
    path.write_text(path.read_text().replace("ACG", "AGG", 1))
    return {"source": path}


BAD = {
    "a file": (_file, r"run\.out = .*/run: not a folder \(Not a directory\)", 2),
    "under a file": (_under_a_file, r"run\.out = .*/run/inner: not a folder \(Not a directory\)", 2),
    "another folder": (_foreign, r"is not a run's folder \(it holds thesis\.tex and no run\.toml\)", 2),
    "lock": (_lock_is_a_folder, r"cannot be written \(Is a directory\)", 2),
    "log": (_log_is_a_folder, r"log\.txt: cannot be written \(Is a directory\)", 2),
    "run.toml": (_broken_toml, r"run\.toml: not valid TOML", 2),
    "all broken": (_no_checkpoint_is_whole, r"checkpoints: none of its checkpoints is whole", 2),
    "binary metrics": (_binary_metrics, r"metrics\.jsonl: is not text \(byte 0\)", 2),
    "odd metrics": (_odd_line_in_metrics, r"metrics\.jsonl: line 2 is not a metrics record", 2),
    "metrics folder": (_metrics_is_a_folder, r"metrics\.jsonl: is not a file", 2),
    "evaluate.json": (_broken_evaluation, r"evaluate\.json: not valid JSON", 2),
    "other data": (_changed_data, r"data: the checkpoint stands in other data", 2),
}


@pytest.mark.parametrize("damage, message, code", BAD.values(), ids=BAD)
def test_a_bad_folder_ends_in_one_line_that_names_it(run, tmp_path, damage, message, code):
    recipe = load_recipe(run / "run.toml")
    changed = damage(run) or {}
    source = [
        source.model_copy(update={"path": str(tmp_path / "random.fa")}) for source in recipe.data.sources
    ]
    if "source" in changed:
        (run / "run.toml").write_text(
            (run / "run.toml").read_text().replace(recipe.data.sources[0].path, source[0].path)
        )
        recipe = load_recipe(run / "run.toml")
    out = recipe.run.model_copy(update={"out": str(changed.get("out", run))})
    said, exit_code = _refusal(lambda: train(recipe.model_copy(update={"run": out}), resume=True))
    assert re.search(message, said)
    assert exit_code == code


CHANGED = {
    "train.lr=0.5": r"train\.lr = 0\.5: this run began with 0\.01, .* only kernels\.cpu, kernels\.require, memory",
    "data.length=64": r"data\.length = 64: this run began with 128",
    "run.seed=3": r"run\.seed = 3: this run began with 0",
    "run.threads=2": r"run\.threads = 2: this run began with 1",
    "evaluate.sequences=4": r"evaluate\.sequences = 4: this run began with 2",
    "data.sources.0.weight=2.0": r"data\.sources\.0\.weight = 2\.0: this run began with 1\.0",
    "train.steps=4": r"train\.steps = 4: the newest checkpoint is of step 5; set train\.steps to 5 or more",
}


@pytest.mark.parametrize("override, message", CHANGED.items(), ids=CHANGED)
def test_a_resumed_run_with_another_recipe_is_refused_by_field(run, override, message):
    said, code = _refusal(_resume, run, override)
    assert re.search(message, said)
    assert code == 2


def test_a_second_process_in_the_same_folder_is_refused(run):
    import fcntl

    with (run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said, code = _refusal(_resume, run)
    assert "another process is training in it" in said
    assert code == 2


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(state.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    said, code = _refusal(train, recipe_in(tmp_path))
    assert re.search(
        r"checkpoints: the checkpoint of step 1 needs \d\.\d MB and 0\.0 MB are free; make room", said
    )
    assert code == 1
    assert not (tmp_path / "run/metrics.jsonl").exists()


COMMAND = "from longstrand.cli import main; main()"
COMMAND_LIMITED_IN_A_SAVE = """
import resource

from longstrand.train import saving

save = saving.save_checkpoint


def limited(*arguments, **named):
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    return save(*arguments, **named)


saving.save_checkpoint = limited
from longstrand.cli import main
main()
"""


def _resumed_by(program, run, **how):
    return subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            "train",
            str(run / "run.toml"),
            "--set",
            f"run.out={run}",
            "--resume",
        ],
        capture_output=True,
        text=True,
        **how,
    )


def test_a_file_size_limit_during_a_save_ends_in_one_line_and_the_run_goes_on_from_the_last_checkpoint(
    finished, run
):
    shutil.rmtree(run / "checkpoints/step_000005")
    limited = _resumed_by(COMMAND_LIMITED_IN_A_SAVE, run)
    assert limited.returncode == 1
    last = limited.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"error: .*checkpoints: the checkpoint of step 5 cannot be written \(File too large\).*", last
    )
    assert "Traceback" not in limited.stderr
    assert checkpoints(run) == ["step_000004"]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5]
    _resume(run)
    assert differences(finished, run) == []


def test_a_file_size_limit_that_no_checkpoint_fits_is_refused_before_the_first_step_and_loses_nothing(
    finished, run
):
    shutil.rmtree(run / "checkpoints/step_000005")
    limited = _resumed_by(
        COMMAND, run, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    )
    assert limited.returncode == 2
    last = limited.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"error: .*size of a file: each rank writes its part of a checkpoint .*ulimit -f.*", last
    )
    assert "Traceback" not in limited.stderr
    assert checkpoints(run) == ["step_000004"]
    _resume(run)
    assert differences(finished, run) == []


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_once_there_is_room(finished, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        recipe = load_recipe(finished / "run.toml", [f"run.out={disk / 'run'}"])
        (disk / "ballast").write_bytes(bytes(3 * 2**20 - 1_100_000))
        said, code = _refusal(train, recipe)
        assert re.search(r"needs \d\.\d MB and \d\.\d MB are free|No space left on device", said)
        assert code == 1
        (disk / "ballast").unlink()
        train(recipe, resume=True)
        assert differences(finished, disk / "run") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_sigterm_to_the_command_saves_and_exits_143(finished, tmp_path):
    for name in ("random.fa", "tiny.json", "recipe.toml"):
        shutil.copy(finished.parent / name, tmp_path / name)
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "train", str(finished / "run.toml"), "--set", f"run.out={out}",
         "--set", "train.steps=100000"], stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("step 1/"):
            break
    process.send_signal(signal.SIGTERM)
    said = process.stderr.read()
    assert process.wait() == 143
    assert re.search(
        r"^stopped by SIGTERM: step \d+ of 100000 is saved; go on with longstrand train", said, re.MULTILINE
    )
    newest = state.latest_checkpoint(out)
    assert json.loads((newest / "trainer.json").read_text())["step"] == metrics(out)[-1]["step"]
    assert os.path.getsize(out / "run.toml") > 0
