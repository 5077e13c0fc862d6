"""What a rank holds at a moment, by name, and what it held at the peak of each phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Held:
    """Bytes by name; the peak of a phase is kept with all its names."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.peaks: dict[str, dict[str, int]] = {}
        self._phase = ""
        self._sum, self._most = 0, dict[str, int]()

    def phase(self, name: str) -> None:
        """What comes now belongs to this phase."""
        self._phase = name
        self.at_once()

    def add(self, name: str, num_bytes: int) -> None:
        """It stays until it is taken away."""
        self.now[name] = self.now.get(name, 0) + num_bytes
        self._sum += num_bytes
        self.at_once()

    def take(self, name: str, num_bytes: int | None = None) -> None:
        """Takes away some bytes of a name, or all."""
        held = self.now.get(name, 0)
        taken = held if num_bytes is None else num_bytes
        self.now[name] = held - taken
        self._sum -= taken
        assert self.now[name] >= 0, name

    def at_once(self, more: Mapping[str, int] | None = None) -> None:
        """Beside all that is held, something lives for a moment."""
        size = self._sum + sum(more.values()) if more else self._sum
        if size > self._most.get(self._phase, 0):
            found = self.now | {name: self.now.get(name, 0) + n for name, n in (more or {}).items()}
            self._most[self._phase] = size
            self.peaks[self._phase] = {name: n for name, n in found.items() if n}

    @contextmanager
    def during(self, name: str, num_bytes: int) -> Iterator[None]:
        """It lives inside."""
        self.add(name, num_bytes)
        yield
        self.take(name, num_bytes)
