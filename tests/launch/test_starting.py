"""How `longstrand train` is started: what it refuses, and what becomes of the processes it starts."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from longstrand.bench._small_models import architecture
from longstrand.bench.crash import write_inputs
from longstrand.config import ParallelSection, load_recipe
from longstrand.errors import UserError
from longstrand.launch import start_training
from longstrand.launch.starting import require_fit
from longstrand.model import load_model, save_model

BRIEF = ["--set", "evaluate.before=false", "--set", "evaluate.sequences=2", "--set", "parallel.data=2"]


def command(folder, *arguments, steps=3, launcher=("-m",)):
    recipe = folder / "recipe.toml"
    if not recipe.exists():
        write_inputs(folder, steps=steps)
    return [sys.executable, *launcher, "longstrand", "train", str(recipe), *BRIEF, *arguments]


def ended(folder, *arguments, **options):
    """Exit code and what was said."""
    done = subprocess.run(command(folder, *arguments, **options), capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def running(folder, *arguments, steps=4000):
    """A run of many steps, which does not outlive the test."""
    process = subprocess.Popen(command(folder, *arguments, steps=steps), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def steps_of(run):
    path = Path(run) / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def process_ids():
    return {int(path.name) for path in Path("/proc").glob("[0-9]*")}


def descendants(pid):
    """The processes that a process has started, and theirs."""
    parents = {}
    for each in process_ids():
        try:
            status = Path(f"/proc/{each}/stat").read_text()
        except OSError:
            continue
        parents[each] = int(status.rpartition(")")[2].split()[1])
    found, more = set(), {pid}
    while more:
        more = {each for each, parent in parents.items() if parent in more} - found
        found |= more
    return found


def wait_until(reached, seconds=200):
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    "parallel, number, words",
    [
        (ParallelSection(), 2, r"2 processes .* without \[parallel\].* parallel.data = 2 .* parallel.context = 2"),
        (ParallelSection(data=2, context=2), 2, r"2 x 2: must be the number of processes, 2; start 4 \(--workers 4"),
        (ParallelSection(data=2), 1, r"2 x 1: must be the number of processes, 1; start 2"),
    ],
)  # fmt: skip
def test_a_recipe_for_another_number_of_processes_is_refused(parallel, number, words):
    with pytest.raises(UserError, match=words):
        require_fit(parallel, number)


def test_under_torchrun_no_other_way_to_start_is_taken(tmp_path):
    write_inputs(tmp_path, steps=1)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    with pytest.raises(UserError, match="--workers: torchrun has started the processes already"):
        start_training(lambda: load_recipe(tmp_path / "recipe.toml"), environment, workers=2)


def test_torchrun_trains_and_what_it_refuses_is_said_once(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    code, said = ended(tmp_path, launcher=launcher)
    assert code == 0, said
    run = tmp_path / "never_killed"
    assert steps_of(run) == [1, 2, 3]
    assert (run / "report.html").exists()
    code, said = ended(tmp_path, launcher=launcher)
    assert code != 0
    assert said.count("holds a run already") == 1


def test_torchrun_generates_and_one_rank_speaks(tmp_path):
    model = save_model(load_model(architecture("KD", vocab_size=256)), tmp_path / "model")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "longstrand"]
    asked = ["generate", str(model), "--prompt", "GATTACA", "--max-new-tokens", "5"]
    ranks = subprocess.run(
        [sys.executable, *launcher, *asked, "--context", "2"], capture_output=True, text=True, timeout=200
    )
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stderr.count("1 sequences, 5 new tokens") == 1
    one = subprocess.run(
        [sys.executable, "-m", "longstrand", *asked], capture_output=True, text=True, timeout=200
    )
    assert ranks.stdout.split("mean_logprob")[0] == one.stdout.split("mean_logprob")[0]
    assert ranks.stdout.splitlines()[1] == one.stdout.splitlines()[1]


def test_workers_stop_at_the_same_step_and_none_outlives_the_one_who_waits(tmp_path):
    run = tmp_path / "never_killed"
    with running(tmp_path, "--workers", "2") as process:
        wait_until(lambda: len(steps_of(run)) > 2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=100)[1]
    assert process.returncode == 143
    assert said.count("stopped by SIGTERM") == said.count("finishing this step") == 1
    saved = int(max(path.name for path in (run / "checkpoints").iterdir()).removeprefix("step_"))
    assert steps_of(run) == list(range(1, saved + 1))

    with running(tmp_path, "--workers", "2", "--resume") as process:
        wait_until(lambda: len(steps_of(run)) > saved + 2)
        children = descendants(process.pid)
        assert len(children) >= 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: not children & process_ids(), seconds=20)
