"""What is written for a person to read: a reader that goes away ends no work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from longstrand.errors import RunFailed


class Shown:
    """A stream for a person to read: once it takes no more, what comes is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None
        self._lost: Callable[[OSError], None] = lambda _: None

    @property
    def lost(self) -> Callable[[OSError], None]:
        """Is told why nothing more is taken: by the thread that meets it, or at once where that was before."""
        return self._lost

    @lost.setter
    def lost(self, tell: Callable[[OSError], None]) -> None:
        self._lost = tell
        if self._error is not None:
            tell(self._error)

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        if self._error is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Hands on what is held, or drops it."""
        if self._error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        self._error = error
        _silence(self._stream)
        self._lost(error)


class Stdout:
    """The stream of what a command prints: one that takes no more is an error that names it, once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text.

        Raises:
            OSError: it is not taken; the file that it names is stdout.
        """
        if text == "":  # as a probe, whose error typer swallows
            return 0
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        """Hands on what is held.

        Raises:
            OSError: as `write`.
        """
        with self._named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _silence(self._stream)
            error.filename = "stdout"
            raise


def named(stream: Any) -> Any:
    """Stdout as one whose errors name it; None, where a process has none, as it is."""
    return stream if stream is None or isinstance(stream, Stdout) else Stdout(stream)


def shown(stream: Any) -> Any:
    """The stream as one that may be lost; None, where a process has none, as it is."""
    return stream if stream is None or isinstance(stream, Shown) else Shown(stream)


def say(text: object) -> None:
    """Prints a line that tells where a result lies: without a reader the result lies there all the same.

    Raises:
        RunFailed: stdout takes no line for another reason, such as a full disk; the error tells what the line would.
    """
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        raise RunFailed(
            f"stdout: {error.strerror or error}; what it would have told: the work is done, and its result whole in "
            f"{text}"
        ) from error


def _silence(stream: TextIO) -> None:
    """What the stream still holds goes nowhere, else Python ends with code 120 when it cannot flush it."""
    with suppress(OSError), open(os.devnull, "w") as nowhere:  # a stream of Python alone has no descriptor
        os.dup2(nowhere.fileno(), stream.fileno())
