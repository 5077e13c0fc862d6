"""How `longstrand train` is started: what it refuses, and what becomes of the processes it starts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import longstrand
from longstrand.bench._small_models import architecture
from longstrand.bench.crash import write_inputs
from longstrand.config import ParallelSection, load_recipe
from longstrand.errors import RunFailed, UserError
from longstrand.launch import start_training
from longstrand.launch.local import _remedy
from longstrand.launch.starting import require_fit
from longstrand.model import load_model, save_model
from longstrand.parallel import make_mesh, mesh, processes, run_ranks
from longstrand.train.run_folder import Started

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
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


def test_where_ray_is_missing_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_inputs(tmp_path, steps=3)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(UserError, match=r'Ray is not installed; pip install "longstrand\[ray\]"'):
        start_training(lambda: load_recipe(tmp_path / "recipe.toml"), {}, ray="local")


def test_torchrun_trains_and_what_it_refuses_is_said_once(tmp_path):
    code, said = ended(tmp_path, launcher=TORCHRUN)
    assert code == 0, said
    run = tmp_path / "never_killed"
    assert steps_of(run) == [1, 2, 3]
    assert (run / "report.html").exists()
    code, said = ended(tmp_path, launcher=TORCHRUN)
    assert code != 0
    go_on = f"torchrun --standalone --nproc-per-node 2 -m longstrand train {run}/run.toml --resume"
    assert said.count(f"holds a run already; go on with {go_on} (or") == 1


def test_a_dry_run_under_torchrun_checks_the_layout(tmp_path):
    code, said = ended(tmp_path, "--dry-run", launcher=TORCHRUN)
    assert code == 0, said
    assert said.count("rank 0 of 2: data 2 x context 1") == 1
    assert not (tmp_path / "never_killed").exists()


SCORED = """
import os, sys
import torch.distributed as dist
from longstrand import evaluate
from longstrand.cli import main
from longstrand.errors import RunFailed

plain = evaluate._logprobs
def logprobs(*arguments):
    if dist.get_rank() == 1:
        raise RunFailed("this rank's disk is full")
    return plain(*arguments)
evaluate._logprobs = logprobs
sys.argv = ["longstrand", *sys.argv[1:]]
main()
"""


def test_what_a_later_rank_meets_alone_in_an_evaluation_is_said(tmp_path):
    model = save_model(load_model(architecture("KD", vocab_size=256)), tmp_path / "model")
    (tmp_path / "scored.py").write_text(SCORED)
    (tmp_path / "x.fa").write_text(">a\nACGTTGCAACGTAC\n")
    launcher = [*TORCHRUN[:-1], str(tmp_path / "scored.py"), "evaluate", str(model)]
    asked = [sys.executable, *launcher, "--data", str(tmp_path / "x.fa"), "--length", "16", "--context"]
    done = subprocess.run([*asked, "2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr.count("error: this rank's disk is full") == 1, done.stderr
    assert done.stderr.count("Traceback (most") == 1, done.stderr  # torchrun's own
    refused = subprocess.run([*asked, "3"], capture_output=True, text=True, timeout=200)
    assert refused.stderr.count("error: --context 3: must divide the number of processes, 2") == 1, (
        refused.stderr
    )


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


def _held_to_the_end():
    """Tensors of an exchange are dropped late, by a thread of a group that outlives `destroy_process_group`."""
    sys.setswitchinterval(1000)
    sys.held = dist.group.WORLD
    for _ in range(20):
        every = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(8)]
        for each in every:
            each.wait()
    return dist.get_rank()


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_a_rank_that_is_done_ends_well_whatever_its_threads_still_hold(start):
    assert run_ranks(2, _held_to_the_end, start=start, timeout=100) == [0, 1]


@pytest.mark.parametrize("code", [0, 3])
def test_who_leaves_ends_with_its_code_and_is_not_taken_apart(code):
    script = f"""
import atexit, sys, threading, time
from longstrand.rank_process import leave

class Kept:
    def __del__(self):
        print("taken apart", flush=True)

sys.kept = Kept()
atexit.register(lambda: print("at exit"))
threading.Thread(target=lambda: (time.sleep(0.2), print("from a thread"))).start()
print("said")
leave({code})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split("\n")) == (code, ["said", "from a thread", "at exit", ""])


def test_workers_stop_at_the_same_step_and_none_outlives_the_one_who_waits(tmp_path):
    run = tmp_path / "never_killed"
    with running(tmp_path, "--workers", "2") as process:
        wait_until(lambda: len(steps_of(run)) > 2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=100)[1]
    assert process.returncode == 143
    assert said.count("stopped by SIGTERM") == said.count("finishing this step") == 1
    assert f"go on with longstrand train {run}/run.toml --resume --workers 2" in said
    saved = int(max(path.name for path in (run / "checkpoints").iterdir()).removeprefix("step_"))
    assert steps_of(run) == list(range(1, saved + 1))

    with running(tmp_path, "--workers", "2", "--resume") as process:
        wait_until(lambda: len(steps_of(run)) > saved + 2)
        children = descendants(process.pid)
        assert len(children) >= 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: not children & process_ids(), seconds=20)


KILLED = {
    signal.SIGKILL: r"if no one ended it, the system was out of memory \(dmesg names the process\): free some, or put "
    r"fewer ranks on this machine, and go on with {go_on}; a lower memory\.tile needs a new run\.out",
    signal.SIGSEGV: r"compiled code crashed: go on with {go_on}, and if it happens again, with --set kernels\.cpu=",
}


@pytest.mark.parametrize("number", KILLED, ids=[each.name for each in KILLED])
def test_what_to_do_about_a_killed_rank_is_said_and_works(tmp_path, monkeypatch, number):
    monkeypatch.setitem(FAULTS, "killed", (f"os.kill(os.getpid(), {number.value})", ""))
    code, said = faulty_run(tmp_path, monkeypatch, "killed", "--workers", "2")
    assert code == 1
    run = tmp_path / "never_killed"
    go_on = f"longstrand train {run}/run.toml --resume --workers 2"
    what = f"error: rank 1 of 2 was killed by {number.name}; the others were ended; "
    assert re.search(re.escape(what) + KILLED[number].format(go_on=re.escape(go_on)), said), said
    monkeypatch.setenv("PYTHONPATH", str(Path(longstrand.__file__).parents[1]))
    fewer = [*go_on.split()[1:-2], "--set", "parallel.data=1"]
    assert subprocess.run([sys.executable, "-m", "longstrand", *fewer], timeout=200).returncode == 0
    assert steps_of(run) == [1, 2, 3]
    tile = [*fewer, "--set", "memory.tile=64"]
    refused = subprocess.run([sys.executable, "-m", "longstrand", *tile], capture_output=True, timeout=200)
    assert refused.returncode == 2 and b"memory.tile = 64: this run began with" in refused.stderr


def test_a_rank_that_is_killed_before_there_is_a_run_needs_no_resume(tmp_path):
    said = _remedy(signal.SIGKILL, tmp_path, "longstrand train ...")
    assert said.endswith("or put fewer ranks on this machine or lower memory.tile, and start it again")


def _others_wait(axis_name):
    from longstrand.launch.ranks import others_needed

    ranks = make_mesh(data=2, context=1, expert=1)
    with others_needed(ranks.world):
        if ranks.world.rank == 1:
            time.sleep(300)
        getattr(ranks, axis_name).total(1.0)


@pytest.mark.parametrize("axis_name", ["world", "data"])
def test_a_rank_that_stands_still_ends_the_run_once_the_others_have_waited_long_enough(
    axis_name, monkeypatch
):
    for module in (processes, mesh):
        monkeypatch.setattr(module, "MEETING_SECONDS", 2)
    words = r"rank 0 of 2 on .*: another rank did not answer in time \(.*2000ms"
    with pytest.raises(RunFailed, match=words):
        run_ranks(2, _others_wait, axis_name, start="fork", timeout=60)


SITE = """
import importlib.machinery, os, sys

def faulty(module):
    plain = module.take_step
    def take_step(*arguments, **options):
        import torch.distributed as dist
        from longstrand.errors import RunFailed
        if options["step"] == 2 and dist.get_rank() == 1:
            {fault}
        return plain(*arguments, **options)
    module.take_step = take_step

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "longstrand.train.sft":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), faulty(module))
        return spec

sys.meta_path.insert(0, Finder())
"""
FAULTS = {
    "bug": ("raise ValueError('a fault of ours')", "ValueError: a fault of ours"),
    "disk": ("raise RunFailed('the disk is full')", "error: the disk is full"),
}


def faulty_run(folder, monkeypatch, fault, *arguments, **options):
    """A run whose second rank fails in its second step; every process of it finds this out by itself."""
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(SITE.format(fault=FAULTS[fault][0]))
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    return ended(folder, *arguments, **options)


@pytest.mark.parametrize(("way", "fault"), [("workers", "disk"), ("torchrun", "bug"), ("torchrun", "disk")])
def test_what_goes_wrong_on_one_rank_is_said_once_and_ends_the_run(tmp_path, monkeypatch, way, fault):
    options = {"launcher": TORCHRUN} if way == "torchrun" else {}
    code, said = faulty_run(
        tmp_path, monkeypatch, fault, *(["--workers", "2"] if way == "workers" else []), **options
    )
    assert code == 1
    assert said.count(FAULTS[fault][1]) == 1, said
    of_torchrun = way == "torchrun"  # it always ends with one of its own
    assert said.count("Traceback (most") == (fault == "bug") + of_torchrun, said


def test_the_command_that_goes_on_names_how_the_ranks_were_started(tmp_path):
    run = tmp_path / "my run"
    train = f"longstrand train '{run}/run.toml' --resume"
    assert Started().resume_command(run, 1) == train
    assert Started().resume_command(run, 2) == f"{train} --workers 2"
    assert Started(ray="local").resume_command(run, 2) == f"{train} --ray local --workers 2"
    torchrun = Started(torchrun="--standalone --nproc-per-node {}").resume_command(run, 2)
    assert torchrun == f"torchrun --standalone --nproc-per-node 2 -m {train}"
