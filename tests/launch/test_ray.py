"""A run through Ray Train, with a Ray of its own: what it computes, and how it ends."""

import json
import os
import signal

import pytest
from test_starting import (
    FAULTS,
    command,
    descendants,
    ended,
    faulty_run,
    process_ids,
    running,
    steps_of,
    wait_until,
)

from longstrand.config import load_recipe
from longstrand.errors import RunFailed, UserError
from longstrand.launch import start_training
from longstrand.launch.ranks import RankLost
from longstrand.launch.through_ray import _failure

pytest.importorskip("ray", reason="Ray is not installed: the extra [ray]")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

TIMES = {"seconds", "cpu_seconds", "tokens_per_second", "peak_memory_bytes", "remaining_seconds"}


def _records(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if name not in TIMES} for line in lines]


def test_two_workers_train_as_one_process_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    float64 = ("--set", "run.dtype=float64")
    code, said = ended(tmp_path, *float64, "--set", f"run.out={one}", "--set", "parallel.data=1")
    assert code == 0, said
    code, said = ended(tmp_path, *float64, "--set", f"run.out={two}", "--ray", "local", "--workers", "2")
    assert code == 0, said
    assert said.count("done: 3 steps") == 1
    for line, other in zip(_records(one), _records(two), strict=True):
        assert other == {
            name: v if isinstance(v, int) else pytest.approx(v, rel=1e-9) for name, v in line.items()
        }


def test_a_killed_worker_ends_all_and_the_next_run_goes_on(tmp_path):
    run = tmp_path / "never_killed"
    with running(tmp_path, "--ray", "local") as process:
        wait_until(lambda: len(steps_of(run)) > 4)
        children = descendants(process.pid)
        workers = [pid for pid in children if b"RayTrainWorker" in _command_line(pid)]
        assert len(workers) == 2
        os.kill(max(workers), signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "of 2 died without a word" in said
    wait_until(lambda: not children & process_ids(), seconds=20)
    newest = int(max(path.name for path in (run / "checkpoints").glob("step_*")).removeprefix("step_"))
    code, said = ended(tmp_path, "--workers", "2", "--resume", "--set", f"train.steps={newest + 2}")
    assert code == 0, said
    assert steps_of(run) == list(range(1, newest + 3))


def test_an_address_where_no_cluster_is_is_refused(tmp_path):
    command(tmp_path)  # writes the recipe
    recipe = load_recipe(tmp_path / "recipe.toml", ["parallel.data=2"])
    with pytest.raises(UserError, match=r"--ray 127.0.0.1:1: no cluster answers there"):
        start_training(lambda: recipe, dict(os.environ), ray="127.0.0.1:1")


def test_a_fault_of_ours_in_one_worker_is_shown_once(tmp_path, monkeypatch):
    code, said = faulty_run(tmp_path, monkeypatch, "bug", "--ray", "local", "--workers", "2")
    assert code == 1
    assert said.count("rank 1 of 2 failed:") == said.count(FAULTS["bug"][1]) == 1, said
    assert said.count("Traceback (most") == 1, said


def test_a_ray_that_does_not_start_in_time_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def late(**given):
        raise Exception("The current node timed out during startup.\nMore about Ray's inside.")

    command(tmp_path)  # writes the recipe
    recipe = load_recipe(tmp_path / "recipe.toml", ["parallel.data=2"])
    monkeypatch.setattr("ray.init", late)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    words = r"--ray local --workers 2: Ray did not start, tried 0 s \(The current node timed out .* startup.\); look"
    with pytest.raises(RunFailed, match=words):
        start_training(lambda: recipe, {}, ray="local")
    assert not [*(tmp_path / "scratch").iterdir()]


def test_the_cause_is_told_from_its_consequences():
    ours, lost = (0, RankLost("another rank ended"), ""), WorkerGroupError("", {0: OSError(), 1: OSError()})
    assert str(_failure([ours], lost, 2, "local")).startswith("rank 1 of 2 died without a word")
    assert str(_failure([ours, (1, RunFailed("no room"), "")], lost, 2, "local")) == "no room"
    assert "rank 1 of 2 failed:\na trace" in str(_failure([ours, (1, None, "a trace")], lost, 2, "local"))
    late = ControllerError(WorkerGroupStartupTimeoutError(2))
    assert "Ray did not start, tried 5 times (The worker group" in str(_failure([], late, 2, "host:1"))


def _command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
