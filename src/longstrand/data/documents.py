"""Documents as lists of stretches: which stretch of which store, before any letter is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stretches:
    """Stretches of stores; entry i is `[start[i], end[i])` of store `store[i]`, read on the other strand if turned.

    Positions count from the start of the store's values (letters, or tokens where the store holds tokens).
    """

    store: np.ndarray  # int64[N]
    start: np.ndarray  # int64[N]
    end: np.ndarray  # int64[N]
    turned: np.ndarray  # bool[N]

    @classmethod
    def joined(cls, many: Sequence[Stretches]) -> Stretches:
        kinds = {"store": np.int64, "start": np.int64, "end": np.int64, "turned": np.bool_}
        return cls(
            *(
                np.concatenate([np.empty(0, kind), *(getattr(s, name) for s in many)])
                for name, kind in kinds.items()
            )
        )

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lengths(self) -> np.ndarray:
        return self.end - self.start

    def take(self, index: np.ndarray) -> Stretches:
        return Stretches(self.store[index], self.start[index], self.end[index], self.turned[index])

    def first(self, lengths: np.ndarray) -> Stretches:
        """The first `lengths[i]` letters of each stretch, along its own strand."""
        start = np.where(self.turned, self.end - lengths, self.start)
        return Stretches(self.store, start, start + lengths, self.turned)


@dataclass(frozen=True)
class Documents:
    """Documents in a row of stretches: document d is the stretches `bounds[d]:bounds[d + 1]`, one after the other."""

    stretches: Stretches
    bounds: np.ndarray  # int64[D+1]

    @classmethod
    def of_one_stretch_each(cls, stretches: Stretches) -> Documents:
        return cls(stretches, np.arange(len(stretches) + 1))

    @classmethod
    def of_groups(cls, stretches: Stretches, groups: Sequence[np.ndarray]) -> Documents:
        """One document per group of indices into `stretches`."""
        order = np.concatenate([np.empty(0, np.int64), *groups]).astype(np.int64)
        return cls(stretches.take(order), np.cumsum([0, *map(len, groups)]))

    @classmethod
    def joined(cls, many: Sequence[Documents]) -> Documents:
        shifts = np.cumsum([0, *(len(documents.stretches) for documents in many)])
        bounds = [documents.bounds[1:] + shift for documents, shift in zip(many, shifts[:-1], strict=True)]
        return cls(
            Stretches.joined([documents.stretches for documents in many]),
            np.concatenate([np.zeros(1, np.int64), *bounds]),
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64[D]: letters or tokens of each document."""
        ends = np.concatenate([[0], np.cumsum(self.stretches.lengths)])
        return np.diff(ends[self.bounds])

    def stretches_of(self, document: int) -> Stretches:
        return self.stretches.take(np.arange(self.bounds[document], self.bounds[document + 1]))
