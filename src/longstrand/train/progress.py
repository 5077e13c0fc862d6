"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

PLAIN_EVERY_SECONDS = 5.0


class Progress:
    """Shows loss, tokens/s, peak memory and remaining time of the newest step."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        self._console = console
        self._steps = steps
        self._bar: Bar | None = None
        self._shown = float("-inf")
        if console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task("train", total=steps, completed=done, figures="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl; plain lines come at most every 5 seconds, and for the last step."""
        figures = describe(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], figures=figures)
            return
        now = time.monotonic()
        if now - self._shown >= PLAIN_EVERY_SECONDS or record["step"] == self._steps:
            self._shown = now
            write_line(self._console, f"step {record['step']}/{self._steps}  {figures}")


class ConsoleHandler(logging.Handler):
    """Prints log records on the console, above a live line."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        write_line(self._console, prefix + record.getMessage())


def write_line(console: Console, text: str) -> None:
    """Prints text as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(record: dict[str, Any]) -> str:
    """The figures of a step in one line."""
    loss = "no target" if record["loss"] is None else f"loss {record['loss']:.4f}"
    return (
        f"{loss}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"peak {record['peak_memory_bytes'] / 2**30:.2f} GiB  {_duration(record['remaining_seconds'])} left"
    )


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
