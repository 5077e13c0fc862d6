"""What a person sees: one live line in a terminal, a plain line now and then elsewhere."""

import io
import logging

import pytest
from rich.console import Console

from longstrand.errors import RunFailed
from longstrand.train import progress
from longstrand.train.progress import Progress, describe, logged_to


def _record(step, **changes):
    values = {
        "loss": 1.25,
        "tokens_per_second": 12345.6,
        "peak_memory_bytes": 3 * 2**29,
        "remaining_seconds": 3725.0,
    }
    return {"step": step, **values, **changes}


def test_the_figures_of_a_step_in_one_line():
    assert describe(_record(1)) == "loss 1.2500  12,346 tokens/s  peak 1.50 GiB  1:02:05 left"
    assert describe(_record(1, loss=None, remaining_seconds=59.6)).startswith("no target  ")
    assert describe(_record(1, remaining_seconds=59.6)).endswith("1:00 left")


def test_elsewhere_a_line_comes_every_few_seconds_and_for_the_last_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress(Console(file=out), steps=9, done=0) as shown:
        for step in range(1, 10):
            shown.show(_record(step))
            now[0] += 2.0
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        "step 1/9", "step 4/9", "step 7/9", "step 9/9",
    ]  # fmt: skip


def test_in_a_terminal_the_live_line_counts_on_from_the_resumed_step():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(console, steps=9, done=4) as shown:
        shown.show(_record(5))
    last = out.getvalue().replace("\r", "\n")
    assert "5/9" in last
    assert "loss 1.2500  12,346 tokens/s" in last


def test_the_log_goes_to_console_and_file_and_leaves_nothing_behind(tmp_path):
    out = io.StringIO()
    logger = logging.getLogger("longstrand")
    before = (logger.level, list(logger.handlers))
    with logged_to(Console(file=out, width=20), tmp_path / "log.txt"):
        logging.getLogger("longstrand.state").warning("a line that is longer than the console [is wide]")
        logging.getLogger("longstrand.train").info("plain")
    assert out.getvalue() == "warning: a line that is longer than the console [is wide]\nplain\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "WARNING a line that is longer than the console [is wide]", "INFO plain",
    ]  # fmt: skip
    assert (logger.level, list(logger.handlers)) == before


def test_what_ends_the_run_stands_in_the_file(tmp_path):
    out = io.StringIO()
    with pytest.raises(RunFailed), logged_to(Console(file=out), tmp_path / "log.txt"):
        raise RunFailed("the disk is full; make room")
    assert (tmp_path / "log.txt").read_text().endswith("ERROR the disk is full; make room\n")
    assert out.getvalue() == ""
