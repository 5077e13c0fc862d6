"""What is certified on: a little of what the recipe's loader gives, cut so that every seam falls somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from longstrand.data import Loader, Pack
from longstrand.errors import UserError

SHORTEST = 16
"""Tokens below which a document is not cut further."""


@dataclass(frozen=True)
class Document:
    """Tokens and their loss weights as targets; plain numbers, which any process can be given."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def cut(self, length: int) -> Document:
        return Document(self.tokens[:length], self.weights[:length])

    def __len__(self) -> int:
        return len(self.tokens)


Packs = tuple[tuple[Document, ...], ...]
"""The packs of a step, each as its documents."""


def draw_packs(loader: Loader, tokens: int, count: int) -> Packs:
    """The next `count` packs of at most `tokens` in all; the loader moves on by as many steps as that takes.

    Every second one begins with half its length of one document and goes on with halves of what is left of others,
    so that a pack has several documents even where sequences are longer than all that is taken. The number of tokens
    of a pack is odd: where it is cut for several ranks, pools lie across the cuts.

    Raises:
        UserError: no token of them counts in the loss.
    """
    share, given = tokens // count, _documents(loader)
    packs: list[tuple[Document, ...]] = []
    for number in range(count):
        packs.append(short_pack(loader, share) if number % 2 == 0 else _many(given, share))
    if not any(any(document.weights[1:]) for pack in packs for document in pack):
        raise UserError(
            f"--tokens {tokens}: no target of these tokens has a weight, so there is no loss to compare; raise it"
        )
    return tuple(packs)


def packs_of(packs: Packs) -> list[Pack]:
    """The same as training takes them."""
    return [
        Pack.from_documents(
            [torch.tensor(document.tokens) for document in pack],
            [torch.tensor(document.weights) for document in pack],
        )
        for pack in packs
    ]


def alone(packs: Packs) -> Packs:
    """Every document as a pack of its own."""
    return tuple((document,) for pack in packs for document in pack)


def num_tokens(packs: Packs) -> int:
    return sum(len(document) for pack in packs for document in pack)


def short_pack(loader: Loader, share: int) -> tuple[Document, ...]:
    """The documents of the loader's next sequence, as many as there is room for."""
    pack: list[Document] = []
    room = share
    for document in _split(loader.next_step()[0]):
        pack.append(document.cut(room))
        room -= len(pack[-1])
        if room == 0:
            break
    return _odd(pack)


def _many(given: Iterator[Document], share: int) -> tuple[Document, ...]:
    pack: list[Document] = []
    room = share
    while room:
        pack.append(next(given).cut(min(room, max(room // 2, SHORTEST))))
        room -= len(pack[-1])
    return _odd(pack)


def _odd(pack: list[Document]) -> tuple[Document, ...]:
    longest = max(range(len(pack)), key=lambda number: len(pack[number]))
    if sum(map(len, pack)) % 2 == 0 and len(pack[longest]) > 1:
        pack[longest] = pack[longest].cut(len(pack[longest]) - 1)
    return tuple(pack)


def _documents(loader: Loader) -> Iterator[Document]:
    while True:
        for pack in loader.next_step():
            yield from _split(pack)


def _split(pack: Pack) -> Iterator[Document]:
    """Documents with the weights of their tokens as targets: a pack holds them at the token before."""
    tokens, weight, starts = pack.tokens.tolist(), pack.weight.tolist(), pack.starts.tolist()
    for start, stop in pairwise(starts):
        yield Document(tuple(tokens[start:stop]), (1.0, *weight[start : stop - 1]))
