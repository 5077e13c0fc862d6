"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from longstrand.console import shown
from longstrand.errors import LongstrandError, UserError

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
        """Shows a record of metrics.jsonl; plain lines come every 5 seconds at most, and for the last step."""
        figures = describe(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], figures=figures)
            return
        now = time.monotonic()
        if now - self._shown >= PLAIN_EVERY_SECONDS or record["step"] == self._steps:
            self._shown = now
            _write_line(self._console, f"step {record['step']}/{self._steps}  {figures}")


@contextmanager
def logged_to(console: Console | None, file: Path | None) -> Iterator[None]:
    """Sends the log of all of longstrand to the console, if any, and, with its time, to a file.

    What ends the run is written to the file only: the command says it once more itself. A console that takes no more
    is a line of the file, and nothing else.

    Raises:
        UserError: the file cannot be written.
    """
    logger = logging.getLogger("longstrand")
    level = logger.level
    in_file = logging.NullHandler() if file is None else _file_handler(file)
    handlers = (in_file,) if console is None else (_ConsoleHandler(console), in_file)
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        with nullcontext() if console is None else _survived(console, in_file):
            yield
    except LongstrandError as error:
        in_file.handle(_record(logging.ERROR, str(error)))
        raise
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def describe(record: dict[str, Any]) -> str:
    """The figures of a step in one line."""
    loss = "no target" if record["loss"] is None else f"loss {record['loss']:.4f}"
    return (
        f"{loss}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"peak {record['peak_memory_bytes'] / 2**30:.2f} GiB  {_duration(record['remaining_seconds'])} left"
    )


class _ConsoleHandler(logging.Handler):
    """Prints above a live line."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        _write_line(self._console, prefix + record.getMessage())


@contextmanager
def _survived(console: Console, in_file: logging.Handler) -> Iterator[None]:
    """Meanwhile the console may go away, as when what reads from it ends; the file is told, also if it went before.

    It is told past the logger: a live line's thread, which holds the console, would else wait for whoever logs.
    """
    file = console.file
    stream = shown(file)
    before = stream.lost

    def tell(error: OSError) -> None:
        reason = error.strerror or error
        text = f"the console takes no more lines ({reason}): they stand here, the steps in metrics.jsonl"
        in_file.handle(_record(logging.WARNING, text))

    stream.lost = tell
    console.file = stream
    try:
        yield
    finally:
        console.file = file
        stream.lost = before


def _record(level: int, text: str) -> logging.LogRecord:
    return logging.getLogger("longstrand").makeRecord("longstrand", level, "", 0, text, (), None)


def _file_handler(path: Path) -> logging.Handler:
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make it a writable file") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler


def _write_line(console: Console, text: str) -> None:
    """Prints text as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
