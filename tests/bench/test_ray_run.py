"""The figure of starting ranks falls short where it must: other losses, a death nobody names, a process that stays."""

import math
import os
import subprocess
import sys

import pytest

from longstrand.bench import ray_run
from longstrand.bench.ray_run import WAYS, Job, difference, judge_end, processes
from longstrand.config import load_recipe

SAID = {
    "Ray": "rank 1 of 2 died without a word",
    "--workers": "rank 1 of 2 was killed by SIGKILL",
    "torchrun": "Signal 9 (SIGKILL) received by PID 1",
}


def test_the_largest_relative_difference_of_any_step_counts():
    assert difference([2.0, 4.4], [2.0, 4.0]) == pytest.approx(0.1)
    assert difference([2.0], [2.0, 4.0]) == difference([], []) == math.inf


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_an_end_is_judged_by_code_words_time_and_what_is_left(way):
    said = SAID[way.name]
    assert judge_end(way, 1, said, 60, [])["pass"]
    for other in ((0, said, 1, []), (1, "it ended", 1, []), (1, said, 60.1, []), (1, said, 1, ["a worker"])):
        assert not judge_end(way, *other)["pass"]


def test_processes_are_told_apart_until_they_have_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = {pid: parent for (pid, _), parent in processes().items()}
    assert found[process.pid] == os.getpid()
    process.communicate()
    assert process.pid not in {pid for pid, _ in processes()}


def test_a_job_that_leaves_a_process_behind_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_run, "LEFT_SECONDS", 0.2)
    script = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); print('hello')"
    )
    monkeypatch.setattr(Job, "command", lambda job: [sys.executable, "-c", script])
    job = Job(tmp_path / "run", WAYS[1])
    job.wait()
    assert (job.code, job.said, job.left()) == (0, "hello\n", ["sleep 60 "])
    for pid, _ in processes():
        if str(tmp_path).encode() in ray_run._read(pid, "environ") and pid != os.getpid():
            os.kill(pid, 9)


def test_the_command_is_the_demo_with_the_settings_that_the_record_states(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: None)
    words = Job(tmp_path / "run", WAYS[0], "context").command()
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    recipe = load_recipe("demo", overrides)
    assert (recipe.parallel.world, recipe.parallel.context, recipe.run.dtype) == (2, 2, "float64")
    assert words[-4:] == ["--ray", "local", "--workers", "2"]
