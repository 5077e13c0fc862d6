"""How stored values become tokens and loss weights, and how many of them count for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from longstrand.data.documents import Documents, Stretches
from longstrand.data.letters import OTHER_IUPAC, READ_AS_N, LetterPolicy, reverse_complement, show_letter
from longstrand.data.store import HAS_LOWER, HAS_N, NOT_SUPERVISED, Store
from longstrand.errors import UserError

TRAINED, MASKED_N, MASKED_LOWER, MASKED_ROW = range(4)
"""What a value is as a target: trained on, N, lower case at weight 0, or not supervised (prompt, loss_mask)."""
IS_N = 4
_BATCH = 1 << 22


@dataclass(frozen=True)
class Reading:
    """The policy and the token of each letter.

    Attributes:
        ids: int64[256], the token of each upper-case letter, -1 where it has none.
    """

    policy: LetterPolicy
    ids: np.ndarray

    def document(
        self, stores: Sequence[Store], stretches: Stretches, flip: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(token ids int64[T], loss weights float32[T]) of stretches in a row; flipped, the other strand of the row.

        A token's weight stays with its position, so masks turn with the strand.
        """
        tokens, weights = [], []
        for index in range(len(stretches)):
            store = stores[stretches.store[index]]
            stretch = slice(int(stretches.start[index]), int(stretches.end[index]))
            values = np.asarray(store.values[stretch])
            marks = None if store.marks is None else np.asarray(store.marks[stretch])
            if bool(stretches.turned[index]) != flip:
                values = reverse_complement(values)  # of a FASTA, whose letters carry no marks
            tokens.append(self.tokens(store, values))
            weights.append(self.weights(store, values, marks))
        if flip:
            tokens, weights = tokens[::-1], weights[::-1]
        return torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(weights))

    def tokens(self, store: Store, values: np.ndarray) -> np.ndarray:
        """int64 token ids of stored values."""
        if not store.holds_letters:
            return values.astype(np.int64)
        return np.where(self.policy.normal() > 0, self.ids[self.policy.normal()], -1)[values]

    def weights(self, store: Store, values: np.ndarray, marks: np.ndarray | None) -> np.ndarray:
        """float32 loss weights of stored values as targets."""
        letters = self.policy.weights()[values] if store.holds_letters else np.ones(len(values), np.float32)
        return letters if marks is None else letters * self._mark_weights()[marks]

    def causes(self, store: Store, values: np.ndarray, marks: np.ndarray | None) -> np.ndarray:
        """uint8 per value: TRAINED, MASKED_N, MASKED_LOWER or MASKED_ROW."""
        own = self._letter_causes()[values] if store.holds_letters else np.zeros(len(values), np.uint8)
        return own if marks is None else np.maximum(own, self._mark_causes()[marks])

    def is_n(self, store: Store, values: np.ndarray, marks: np.ndarray | None) -> np.ndarray:
        """bool per value: it is read as N (a token: it spans one)."""
        if store.holds_letters:
            return self.policy.is_n()[values]
        return np.zeros(len(values), bool) if marks is None else marks & HAS_N > 0

    def counts(self, stores: Sequence[Store], stretches: Stretches) -> np.ndarray:
        """int64[N, 5]: values of each stretch by cause, and (entry IS_N) how many are read as N."""
        counts = np.zeros((len(stretches), 5), np.int64)
        for which, store, start, end in _batches(stores, stretches):
            if store.marks is None and not store.holds_letters:  # plain tokens: all are trained on
                continue
            values = np.asarray(store.values[start:end])
            marks = None if store.marks is None else np.asarray(store.marks[start:end])
            borders = np.stack([stretches.start[which], stretches.end[which]], axis=1)
            borders = borders.clip(start, end).ravel() - start

            def count(flag: np.ndarray, borders: np.ndarray = borders) -> np.ndarray:
                padded = np.append(flag, False)  # reduceat refuses a border at the end
                sums = np.add.reduceat(padded, borders, dtype=np.int64)[::2]
                return np.where(borders[1::2] > borders[::2], sums, 0)

            causes = self.causes(store, values, marks)
            for cause in (MASKED_N, MASKED_LOWER, MASKED_ROW):
                counts[which, cause] += count(causes == cause)
            counts[which, IS_N] += count(self.is_n(store, values, marks))
        counts[:, TRAINED] = stretches.lengths - counts[:, MASKED_N : MASKED_ROW + 1].sum(axis=1)
        return counts

    def document_counts(self, stores: Sequence[Store], documents: Documents) -> tuple[np.ndarray, np.ndarray]:
        """(int64[D, 5] of all values, int64[D, 5] of the first values, which are no targets)."""
        if not len(documents):
            return np.zeros((0, 5), np.int64), np.zeros((0, 5), np.int64)
        counts = np.add.reduceat(self.counts(stores, documents.stretches), documents.bounds[:-1], axis=0)
        stretches = documents.stretches.take(documents.bounds[:-1])
        first = np.where(stretches.turned, stretches.end - 1, stretches.start)
        return counts, self.counts(stores, Stretches(stretches.store, first, first + 1, stretches.turned))

    def check_letters(self, stores: Sequence[Store], stretches: Stretches) -> None:
        """Refuses letters that the policy or the vocabulary refuses, where the stretches hold them.

        Raises:
            UserError: the first such letter, with file, record and position.
        """
        normal = self.policy.normal()
        refused = (normal > 0) & (self.ids[normal] < 0)
        if self.policy.iupac == "error":
            refused[list(OTHER_IUPAC + READ_AS_N)] = True
        for index in np.unique(stretches.store):
            store = stores[index]
            if store.holds_letters and any(refused[ord(letter)] for letter in store.facts["letters"]):
                own = stretches.take(np.flatnonzero(stretches.store == index))
                for start, end in zip(own.start.tolist(), own.end.tolist(), strict=True):
                    found = np.flatnonzero(refused[store.values[start:end]])
                    if len(found):
                        self._refuse(store, start + int(found[0]))

    def _refuse(self, store: Store, position: int) -> NoReturn:
        record, byte = store.record_at(position), int(store.values[position])
        place = f"{store.place(record)}, letter {position - int(store.starts[record]) + 1:,}"
        letter = show_letter(byte)
        if self.ids[self.policy.normal()[byte]] < 0:
            raise UserError(
                f'{place}: {letter} has no token of its own in the model; with data.iupac = "n" it reads as N'
            )
        raise UserError(
            f'{place}: {letter} is refused by data.iupac = "error"; set "n" to read it as N, or remove it'
        )

    def _letter_causes(self) -> np.ndarray:
        """uint8[256]: what each letter is as a target."""
        causes = np.where(self.policy.weights() == 0, MASKED_LOWER, TRAINED).astype(np.uint8)
        if self.policy.n == "mask":
            causes[self.policy.is_n()] = MASKED_N
        return causes

    def _mark_causes(self) -> np.ndarray:
        """uint8[8]: what a value with each combination of marks is as a target."""
        marks = np.arange(8)
        causes = np.where(self._mark_weights() == 0, MASKED_LOWER, TRAINED).astype(np.uint8)
        if self.policy.n == "mask":
            causes[marks & HAS_N > 0] = MASKED_N
        causes[marks & NOT_SUPERVISED > 0] = MASKED_ROW
        return causes

    def _mark_weights(self) -> np.ndarray:
        """float32[8]: the loss weight of each combination of marks."""
        marks = np.arange(8)
        weights = np.ones(8, np.float32)
        if self.policy.case != "ignore":
            weights[marks & HAS_LOWER > 0] = self.policy.case
        if self.policy.n == "mask":
            weights[marks & HAS_N > 0] = 0
        weights[marks & NOT_SUPERVISED > 0] = 0
        return weights


def _batches(stores: Sequence[Store], stretches: Stretches) -> Iterator[tuple[np.ndarray, Store, int, int]]:
    """(stretches, store, start, end): stretches of at most `_BATCH` values and the stretches that reach into each."""
    order = np.lexsort((stretches.start, stretches.store))
    at = 0
    while at < len(order):
        first = order[at]
        start, store = int(stretches.start[first]), int(stretches.store[first])
        stop = at + 1
        while (
            stop < len(order)
            and stretches.store[order[stop]] == store
            and stretches.end[order[stop]] - start <= _BATCH
        ):
            stop += 1
        which = order[at:stop]
        end = int(stretches.end[which].max())
        for piece in range(start, end, _BATCH):
            yield which, stores[store], piece, min(piece + _BATCH, end)
        at = stop
