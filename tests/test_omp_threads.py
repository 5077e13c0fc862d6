"""OMP_NUM_THREADS is read as torch's OpenMP reads it, and a value that it ignores is said."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from called import caller

from longstrand.bench.crash import write_inputs
from longstrand.doctor import examine
from longstrand.omp_threads import flaw_of_told_threads, told_threads

IGNORED = ["abc", "0", "-1", "1.5", "1,", "1,0", "0x1", "\u0661", "99999999999", "2147483648", f"1,{2**64}"]
TAKEN = {
    "1": 1,
    " 2": 2,
    "+1": 1,
    "1,2": 1,
    "99": 99,
    "2147483647": 2**31 - 1,
    "1,99999999999": 1,
    "0" * 30 + "3": 3,
}


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
    for told in ("abc", "0", "-1", "1,0", f"1,{2**64}", str(2**64 - 1)):
        assert started(told) == untold
    for told in ("+1", "1,2", "1,99999999999"):
        assert started(told) == 1


def test_openmp_takes_up_to_an_int_and_keeps_32_bits_of_what_is_larger():
    """Asked without torch, which starts at most one thread for each core: 99999999999 = 23 * 2**32 + 1215752191."""
    torch = importlib.util.find_spec("torch")
    found = sorted((Path(torch.origin).parent / "lib").glob("libgomp*"))
    if not found:
        pytest.skip("this torch has no libgomp")
    code = f"import ctypes; print(ctypes.CDLL({str(found[0])!r}).omp_get_max_threads())"

    def most(told):
        return int(
            subprocess.check_output([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": told})
        )

    assert most("2147483647") == 2**31 - 1
    assert (most("2147483648"), most("99999999999")) == (-(2**31), 1_215_752_191)


@pytest.mark.parametrize(
    ("told", "does"),
    [
        ("2147483648", "OpenMP keeps 32 bits of it"),
        ("99999999999", "OpenMP keeps 32 bits of it"),
        (str(2**64), "it is ignored"),
        ("9" * 5000, "it is ignored"),
        ("abc", "it is ignored"),
        ("0", "it is ignored"),
    ],
)
def test_what_becomes_of_a_number_that_cannot_be_is_said(told, does):
    flaw = flaw_of_told_threads({"OMP_NUM_THREADS": told})
    assert (
        flaw is not None
        and f"must be a whole number from 1 to 2147483647; {does}" in flaw
        and len(flaw) < 250
    )


@pytest.mark.parametrize("told", ["abc", "0", "-1", "99999999999"])
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
