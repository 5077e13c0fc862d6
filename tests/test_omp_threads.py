"""OMP_NUM_THREADS is read as torch's OpenMP reads it, and a value that it ignores is said."""

import json
import os
import subprocess
import sys

import pytest
from called import caller

from longstrand.bench.crash import write_inputs
from longstrand.doctor import examine
from longstrand.omp_threads import flaw_of_told_threads, told_threads

IGNORED = ["abc", "0", "-1", "1.5", "1,", "1,0", "0x1", "\u0661"]
TAKEN = {"1": 1, " 2": 2, "+1": 1, "1,2": 1, "99": 99}


def test_a_number_from_1_is_taken_and_anything_else_is_a_flaw():
    for told, number in TAKEN.items():
        environment = {"OMP_NUM_THREADS": told}
        assert (told_threads(environment), flaw_of_told_threads(environment)) == (number, None)
    for told in IGNORED:
        environment = {"OMP_NUM_THREADS": told}
        assert told_threads(environment) is None
        assert f"OMP_NUM_THREADS = {told!r}: must be" in (flaw_of_told_threads(environment) or "")
    for environment in ({}, {"OMP_NUM_THREADS": ""}):
        assert told_threads(environment) is flaw_of_told_threads(environment) is None


def test_torch_starts_with_what_is_taken_and_as_if_nothing_was_told_with_what_is_not():
    def started(told):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment |= {} if told is None else {"OMP_NUM_THREADS": told}
        code = "import torch; print(torch.get_num_threads())"
        return int(subprocess.check_output([sys.executable, "-c", code], env=environment))

    untold = started(None)
    for told in ("abc", "0", "-1", "1,0"):
        assert started(told) == untold
    for told in ("+1", "1,2"):
        assert started(told) == 1


@pytest.mark.parametrize("told", ["abc", "0", "-1"])
def test_train_plan_and_doctor_say_what_is_ignored(told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    write_inputs(tmp_path, steps=2)
    call, said = caller(monkeypatch, capsys), f"OMP_NUM_THREADS = {told!r}: must be a whole number from 1"
    free = ("recipe.toml", "--set", "run.threads=none", "--set", "evaluate.before=false")
    planned = call("plan", *free, "--json")
    assert planned.err.count(f"warning: {said}") == 1 and json.loads(planned.out)
    assert said not in call("plan", "recipe.toml", "--json").err  # there run.threads says it
    assert call("train", *free, "--dry-run").err.count(f"warning: {said}") == 1
    found = {each.name: each for each in examine(tmp_path, dict(os.environ))}["threads"]
    assert found.state == "note" and said in found.found


def test_the_log_of_a_run_has_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    write_inputs(tmp_path, steps=2)
    brief = ("--set", "run.threads=none", "--set", "run.out=run", "--set", "evaluate.before=false")
    assert caller(monkeypatch, capsys, "train")("recipe.toml", *brief).code == 0
    assert (tmp_path / "run/log.txt").read_text().count("WARNING OMP_NUM_THREADS = '0': must be") == 1
