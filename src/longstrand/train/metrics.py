"""metrics.jsonl: one line per step, written at once; other tools are fed from the same records."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from longstrand.atomic import write_atomic
from longstrand.errors import RunFailed, UserError

FILE = "metrics.jsonl"


@runtime_checkable
class Sink(Protocol):
    """Another place that each record goes to."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """The open metrics file of a run and its sinks."""

    def __init__(self, run: Path, sinks: list[Sink]) -> None:
        self._path = run / FILE
        self._sinks = sinks
        try:
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be written ({error.strerror}); make it a writable file"
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line and hands the record to every sink.

        Raises:
            RunFailed: the disk does not take it.
        """
        try:
            line = memoryview((json.dumps(record, allow_nan=False) + "\n").encode())
            while line:
                line = line[self._file.write(line) :]
            for sink in self._sinks:
                sink.write(record)
        except OSError as error:
            raise RunFailed(
                f"{self._path}: step {record['step']} cannot be written ({error.strerror}); "
                "free space on that disk, then go on with --resume"
            ) from error

    def sync(self) -> None:
        """Forces the lines onto the disk: a checkpoint must never be newer than its metrics."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def cut_after(run: Path, step: int) -> tuple[int, int]:
    """Removes the lines after a step, and a torn last line.

    Returns:
        Lines removed, and steps up to this one that should have a line but have none.

    Raises:
        UserError: a line that is not the last one is not a record.
    """
    path = run / FILE
    text = _read(path)
    lines, kept, steps = text.splitlines(), [], set()
    for number, line in enumerate(lines, start=1):
        found = _step_of(line)
        if found is None and number < len(lines):
            raise UserError(
                f"{path}: line {number} is not a metrics record; restore the file, or remove that line"
            )
        if found is not None and found <= step:
            kept.append(line)
            steps.add(found)
    whole = "".join(line + "\n" for line in kept)
    if whole != text:
        write_atomic(path, whole)
    return len(lines) - len(kept), step - len(steps - {0})


def open_sinks(run: Path, names: Sequence[str], step: int) -> list[Sink]:
    """The sinks that a recipe names; what they hold after `step` is purged.

    Raises:
        UserError: one of them is not installed.
    """
    return [_open_tensorboard(run, step) for name in names if name == "tensorboard"]


def _open_tensorboard(run: Path, step: int) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            'run.sinks = ["tensorboard"]: TensorBoard is not installed; '
            'pip install "longstrand[tensorboard]", or remove it from run.sinks'
        ) from error
    return _TensorBoard(SummaryWriter(str(run / "tensorboard"), purge_step=step + 1))


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def _read(path: Path) -> str:
    if not path.exists():
        return ""
    if not path.is_file():
        raise UserError(f"{path}: is not a file; restore it, or start a new run")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not text (byte {error.start}); restore the file, or start a new run"
        ) from error


def _step_of(line: str) -> int | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
