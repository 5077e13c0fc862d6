"""What a plan says: named amounts of bytes, where they lie, and how well they are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "host", "file"]

Kind = Literal["gpu", "cpu"]
"""Of a device."""

_COUNTED: Mapping[Kind, str] = {
    "cpu": "measured: living tensors, counted on a CPU (docs/planner.md)",
    "gpu": "counted: living tensors, on a CPU and not on a GPU (docs/planner.md)",
}
_SPOOL = "measured: the size of a spool (docs/planner.md)"


def evidence_of(kind: Kind, place: Place) -> str:
    """Of a term whose expression is compared with what a run on a CPU allocates; a file is the same anywhere."""
    return _SPOOL if place == "file" else _COUNTED[kind]


@dataclass(frozen=True)
class Term:
    """Bytes of one rank.

    Attributes:
        why: how they come about, in a few words.
        evidence: "measured: where", "counted: where, and not here", or "estimated: from what".
    """

    name: str
    num_bytes: int
    place: Place
    why: str
    evidence: str


@dataclass(frozen=True)
class Memory:
    """What lives at the peak of each phase of a step, on one rank.

    Attributes:
        phases: by name, in the order in which they come: "start", "forward", "backward", "optimizer"; the device
            terms of a phase add up to its peak.
        elsewhere: host memory and files of this rank, for the whole step.
    """

    phases: Mapping[str, tuple[Term, ...]]
    elsewhere: tuple[Term, ...] = ()

    @property
    def peak_phase(self) -> str:
        """The phase that needs most of the device."""
        return max(self.phases, key=lambda phase: total(self.phases[phase]))

    @property
    def device(self) -> tuple[Term, ...]:
        """The terms at the peak of the whole step."""
        return self.phases[self.peak_phase]

    @property
    def device_bytes(self) -> int:
        return total(self.device)

    def bytes_of(self, place: Place) -> int:
        """Of one rank."""
        return self.device_bytes if place == "device" else total(self.elsewhere, place)


def total(terms: Iterable[Term], place: Place | None = None) -> int:
    """Bytes of all terms, or of those in one place."""
    return sum(term.num_bytes for term in terms if place is None or term.place == place)
