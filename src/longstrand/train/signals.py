"""SIGTERM and SIGINT: finish the step, save, then leave (pre-emption is normal on clusters)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from longstrand.errors import LongstrandError
from longstrand.parallel import Axis, said_once

_STEP = b"finishing this step, then saving; the same signal again ends the run at once\n"
_PASS = b"ending where all ranks can; the same signal again ends the run at once\n"

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(LongstrandError):
    """The run ended early because a signal asked for it; the exit code is 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}: {message}")
        self.exit_code = 128 + number
        self._given = (number, message)

    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        """So that one process can hand it to another."""
        return Stopped, self._given


class StopRequests:
    """Remembers the first signal while a step runs; a second one ends the process in the usual way.

    Args:
        silent: of several ranks, one says what happens.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.number: int | None = None
        self._silent = silent
        self._at_once: str | None = None
        self._note = _STEP
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @contextmanager
    def leaving_at_once(self, message: str) -> Iterator[None]:
        """Within it a signal raises `Stopped(message)` where it meets the program: nothing would be lost.

        On several ranks only for what exchanges nothing: one that leaves an exchange lets the others wait.
        """
        before, self._at_once = self._at_once, message
        try:
            if self.number is not None:
                raise Stopped(self.number, message)
            yield
        finally:
            self._at_once = before

    @contextmanager
    def leaving(self, message: str, world: Axis) -> Iterator[Callable[[], None]]:
        """Within it a signal to any rank raises `Stopped(message)` on all of them.

        One process leaves at once. Several leave here, and where all of them call what is yielded.
        """

        def leave_if_asked() -> None:
            number = self.of_all(world)
            if number:
                with said_once(world, Stopped):
                    raise Stopped(number, message)

        before = self._note
        try:
            if world.size > 1:
                self._note = _PASS
                leave_if_asked()
                yield leave_if_asked
            else:
                with self.leaving_at_once(message):
                    yield leave_if_asked
        finally:
            self._note = before

    def of_all(self, world: Axis) -> int:
        """The signal that came to any rank, 0 if none; all ranks call it."""
        return world.largest(self.number or 0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        if self._at_once is not None:
            raise Stopped(number, self._at_once)
        # print() must not be entered again from a handler.
        if not self._silent and sys.stderr is not None:
            with suppress(OSError):  # no one reads any more
                os.write(2, self._note)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
