"""The order of training: which documents stand in which sequence of which step, resumable to the token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longstrand.data.documents import Documents
from longstrand.data.ledger import Served
from longstrand.data.pack import Pack
from longstrand.data.reading import Reading
from longstrand.data.sequences import SequenceSet
from longstrand.data.store import Store
from longstrand.errors import UserError

_OPEN_PACKS = 32
_STATE_VERSION = 1


@dataclass(frozen=True)
class Shelf:
    """One source as the loader draws from it: what it shows per epoch, its share, and its line of the ledger."""

    sequences: SequenceSet
    weight: float
    served: Served


class Loader:
    """Hands out the sequences of each step; the order depends on seed and step only.

    Of several sources, the one whose tokens so far lag most behind its weight gives the next sequence. Each source
    shows every document once per epoch, in an order drawn anew; short documents share a sequence of at most `length`
    tokens; nothing is dropped at an epoch's end, so a step may span two epochs. An epoch's packing is a function of
    (seed, source, epoch) and is planned as a whole, so there is no buffer to lose: the state is a few numbers.

    Args:
        fingerprint: of the data and everything that orders it; a state with another one is refused.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        stores: Sequence[Store],
        reading: Reading,
        *,
        length: int,
        sequences_per_step: int,
        seed: int,
        reverse_complement: bool = False,
        fingerprint: str = "",
    ) -> None:
        self.step = 0
        self.sequences_per_step = sequences_per_step
        self._shelves, self._stores, self._reading = list(shelves), stores, reading
        self._length, self._seed, self._flip = length, seed, reverse_complement
        self._fingerprint = fingerprint
        self._epoch = [0] * len(shelves)
        self._next = [0] * len(shelves)
        self._plans: list[_Epoch | None] = [None] * len(shelves)

    def next_step(self) -> list[Pack]:
        """The sequences of the next optimizer step."""
        packs = [self._next_pack() for _ in range(self.sequences_per_step)]
        self.step += 1
        return packs

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands; plain numbers and text."""
        return {
            "version": _STATE_VERSION,
            "fingerprint": self._fingerprint,
            "step": self.step,
            "sources": [
                {"epoch": epoch, "next": at, "served": dict(vars(shelf.served))}
                for epoch, at, shelf in zip(self._epoch, self._next, self._shelves, strict=True)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a loader of the same data, seed and sequences per step stood.

        Raises:
            UserError: the state is of other data or settings.
        """
        if state["version"] != _STATE_VERSION or state["fingerprint"] != self._fingerprint:
            raise UserError(
                "data: the checkpoint stands in other data (files, regions, split, length, policies, seed or "
                "sequences_per_step changed); resume with the run's own recipe and files, or start a new run"
            )
        self.step = state["step"]
        self._epoch = [source["epoch"] for source in state["sources"]]
        self._next = [source["next"] for source in state["sources"]]
        for shelf, source in zip(self._shelves, state["sources"], strict=True):
            vars(shelf.served).update(source["served"])
        self._plans = [None] * len(self._shelves)

    def _next_pack(self) -> Pack:
        lag = [shelf.served.tokens / shelf.weight for shelf in self._shelves]
        index = lag.index(min(lag))
        plan = self._plan(index)
        chosen = plan.packs[self._next[index]]
        pack = read_pack(self._stores, self._reading, plan.documents, chosen, plan.flips[chosen])
        self._shelves[index].served.add(pack)
        self._next[index] += 1
        if self._next[index] == len(plan.packs):
            self._epoch[index] += 1
            self._next[index] = 0
            self._plans[index] = None
        return pack

    def _plan(self, index: int) -> _Epoch:
        plan = self._plans[index]
        if plan is None:
            epoch = self._epoch[index]
            rng = np.random.default_rng([self._seed, index, epoch])
            documents = self._shelves[index].sequences.in_epoch(epoch)
            order = rng.permutation(len(documents))
            flips = rng.random(len(documents)) < (0.5 if self._flip else 0.0)
            plan = _Epoch(documents, flips, fill_packs(order, documents.lengths, self._length))
            self._plans[index] = plan
        return plan


class DocumentPacks:
    """The chosen documents as packs of one, in order, read when asked for."""

    def __init__(
        self, stores: Sequence[Store], reading: Reading, documents: Documents, chosen: np.ndarray
    ) -> None:
        self._stores, self._reading, self._documents, self._chosen = stores, reading, documents, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Pack:
        return read_pack(self._stores, self._reading, self._documents, np.array([self._chosen[index]]))

    def __iter__(self) -> Iterator[Pack]:
        return (self[index] for index in range(len(self)))

    def dealt(self, rank: int, num_ranks: int) -> DocumentPacks:
        """Documents rank, rank + num_ranks, rank + 2 num_ranks, ...: those of one rank."""
        return DocumentPacks(self._stores, self._reading, self._documents, self._chosen[rank::num_ranks])

    @property
    def lengths(self) -> np.ndarray:
        """int64 tokens of each document."""
        return self._documents.lengths[self._chosen]


def read_pack(
    stores: Sequence[Store],
    reading: Reading,
    documents: Documents,
    chosen: np.ndarray,
    flips: np.ndarray | None = None,
) -> Pack:
    """The chosen documents in a row, each on the strand that `flips` says."""
    flips = np.zeros(len(chosen), bool) if flips is None else flips
    read = [
        reading.document(stores, documents.stretches_of(int(document)), bool(flip))
        for document, flip in zip(chosen, flips, strict=True)
    ]
    return Pack.from_documents([tokens for tokens, _ in read], [weights for _, weights in read])


def fill_packs(order: np.ndarray, lengths: np.ndarray, length: int) -> list[np.ndarray]:
    """Documents of each pack: in order, each into the first of up to 32 open packs that has room for it.

    Every document stands in one pack, uncut; packs come in the order in which their first document does.
    """
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (pack, room)
    for document in order.tolist():
        need = int(lengths[document])
        for at, (pack, room) in enumerate(open_packs):
            if need <= room:
                packs[pack].append(document)
                open_packs[at] = (pack, room - need)
                break
        else:
            packs.append([document])
            open_packs = [*open_packs[-_OPEN_PACKS + 1 :], (len(packs) - 1, length - need)]
        open_packs = [(pack, room) for pack, room in open_packs if room > 1]
    return [np.array(pack) for pack in packs]


@dataclass(frozen=True)
class _Epoch:
    documents: Documents
    flips: np.ndarray  # bool[D], shown on the other strand
    packs: list[np.ndarray]  # documents of each sequence, in order
