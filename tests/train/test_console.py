"""A reader that goes away, as `head` does, ends no training: the log says that it is gone."""

import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from tiny_runs import metrics, recipe_in

from longstrand.console import shown
from longstrand.train.progress import Progress, logged_to
from longstrand.train.signals import StopRequests

LOST = "WARNING the console takes no more lines ({}): they stand here, the steps in metrics.jsonl"


def _train(folder, stdout, stderr, *arguments):
    recipe_in(folder)
    out = [f"run.out={folder / 'run'}", "evaluate.before=false", "train.warmup_steps=1"]
    sets = [part for each in out for part in ("--set", each)]
    command = [sys.executable, "-m", "longstrand", "train", str(folder / "recipe.toml"), *sets, *arguments]
    return subprocess.run(command, stdout=stdout, stderr=stderr, timeout=200, check=False).returncode


@pytest.fixture
def no_reader():
    """The end of a pipe that nobody reads from."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize(
    "arguments", [[], ["--workers", "2", "--set", "parallel.data=2"]], ids=["one", "ranks"]
)
def test_training_goes_on_to_its_end_without_a_reader(tmp_path, no_reader, arguments):
    assert _train(tmp_path, no_reader, no_reader, *arguments) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "run/report.html").exists()
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count(LOST.format("Broken pipe")) == 1
    assert log.endswith("INFO done: 5 steps\n")


def test_a_full_disk_under_the_console_ends_no_training_either(tmp_path):
    with open("/dev/full", "w") as full:
        assert _train(tmp_path, subprocess.DEVNULL, full) == 0
    assert LOST.format("No space left on device") in (tmp_path / "run/log.txt").read_text()


def _called_with_a_full_stdout(*arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "longstrand", *map(str, arguments)]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, check=False
        )
    return done.returncode, done.stderr


def test_a_full_disk_under_stdout_is_named_and_the_run_lies_where_the_error_says(tmp_path):
    recipe_in(tmp_path)
    out = ("--set", f"run.out={tmp_path / 'run'}", "--set", "evaluate.before=false")
    code, err = _called_with_a_full_stdout(
        "train", tmp_path / "recipe.toml", *out, "--set", "train.warmup_steps=1"
    )
    page = tmp_path / "run/report.html"
    said = "error: stdout: No space left on device; what it would have told: the work is done, and its result whole in"
    assert (code, err.splitlines()[-1]) == (1, f"{said} {page}")
    assert page.exists() and [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert _called_with_a_full_stdout("report", tmp_path / "run") == (1, f"{said} {page}\n")


@pytest.mark.parametrize("command", [("config", "show"), ("doctor",), ("plan", "--help")], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_what_a_command_prints_is_an_error_that_names_stdout(
    command, unbuffered, monkeypatch
):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    said = "error: stdout: No space left on device; send it to a file or a disk with space, and run the command again\n"
    assert _called_with_a_full_stdout(*command) == (1, said)


def test_a_reader_of_stdout_that_goes_away_is_no_error_that_is_said(no_reader):
    command = [sys.executable, "-m", "longstrand", "config", "show"]
    done = subprocess.run(
        command, stdout=no_reader, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_what_is_refused_keeps_its_code_without_a_reader(tmp_path, no_reader):
    assert _train(tmp_path, no_reader, no_reader, "--set", "train.steps=none") == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_neither_a_live_line_nor_a_plain_one_ends_anything(tmp_path, no_reader, terminal):
    figures = {"loss": 1.0, "tokens_per_second": 1.0, "peak_memory_bytes": 1, "remaining_seconds": 0.0}
    with os.fdopen(os.dup(no_reader), "w") as file:
        console = Console(file=file, force_terminal=terminal)
        with logged_to(console, tmp_path / "log.txt"), Progress(console, steps=2, done=0) as progress:
            for step in (1, 2):
                progress.show({"step": step, **figures})
    assert (tmp_path / "log.txt").read_text().count("Broken pipe") == 1


def test_a_console_that_was_lost_before_is_a_line_of_each_log(tmp_path, no_reader):
    """As in the second run of `longstrand demo --seeds 2 2>&1 | head -1`."""
    with os.fdopen(os.dup(no_reader), "w") as file:
        stream = shown(file)
        stream.write("for nobody")
        stream.flush()
        for name in ("log_0.txt", "log_1.txt"):
            with logged_to(Console(file=stream), tmp_path / name):
                pass
            assert (tmp_path / name).read_text().count(LOST.format("Broken pipe")) == 1


def test_what_is_lost_after_a_run_leaves_its_log_as_it_was(tmp_path, no_reader):
    log = tmp_path / "log.txt"
    with os.fdopen(os.dup(no_reader), "w") as file:
        stream, told = shown(file), []
        stream.lost = told.append
        own, console = Console(file=stream), Console(file=file)
        with logged_to(own, log):
            pass
        with logged_to(console, tmp_path / "other.txt"):
            assert shown(console.file) is console.file
        assert console.file is file
        log.unlink()
        own.print("for nobody")
        assert [error.strerror for error in told] == ["Broken pipe"]
    assert not log.exists()


def test_a_console_is_made_to_last_once():
    stream = shown(sys.stderr)
    assert shown(stream) is stream
    assert shown(None) is None


def test_a_signal_is_remembered_without_a_reader(no_reader):
    held = os.dup(2)
    os.dup2(no_reader, 2)
    try:
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    finally:
        os.dup2(held, 2)
        os.close(held)
