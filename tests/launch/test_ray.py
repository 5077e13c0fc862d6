"""A run through Ray Train, with a Ray of its own: what it computes, and how it ends."""

import json
import os
import signal

import pytest
from test_starting import command, descendants, ended, process_ids, running, steps_of, wait_until

from longstrand.errors import UserError
from longstrand.launch import start_training

pytest.importorskip("ray", reason="Ray is not installed: the extra [ray]")
TIMES = {"seconds", "tokens_per_second", "peak_memory_bytes", "remaining_seconds"}


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
    from longstrand.config import load_recipe

    recipe = load_recipe(tmp_path / "recipe.toml", ["parallel.data=2"])
    with pytest.raises(UserError, match=r"--ray 127.0.0.1:1: no cluster answers there"):
        start_training(lambda: recipe, dict(os.environ), ray="127.0.0.1:1")


def _command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
