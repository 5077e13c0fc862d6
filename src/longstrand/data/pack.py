"""The one batch type: documents in a row, no padding, no attention mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

NO_TARGET = -1
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Pack:
    """Several documents in a row.

    `targets[t]` is the token that position t predicts: the next one of the same document, or `NO_TARGET` at a
    document's end. `weight[t]` is the weight of that prediction in the loss (0 where there is none). Document s is
    `tokens[starts[s]:starts[s + 1]]`.
    """

    tokens: Int[Tensor, "T"]
    targets: Int[Tensor, "T"]
    weight: Float[Tensor, "T"]
    starts: Int[Tensor, "S1"]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.targets) == len(self.weight):
            raise ValueError("tokens, targets and weight of a pack must have one length")
        rises = len(self.starts) > 1 and bool((self.starts.diff() > 0).all())
        if not rises or int(self.starts[0]) != 0 or int(self.starts[-1]) != len(self.tokens):
            raise ValueError("starts of a pack must rise from 0 to its number of tokens")
        if int(self.tokens.min()) < 0 or int(self.targets.min()) < NO_TARGET:
            raise ValueError(
                f"tokens of a pack count from 0, and its targets too, or are {NO_TARGET} for none"
            )

    @classmethod
    def from_documents(cls, documents: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Pack:
        """Lays documents in a row and shifts their targets.

        Args:
            documents: token ids of each document, 1-D, at least one token each.
            weights: for each document, the loss weight of each of its tokens *as a target* (1 where not given).
                The first token of a document is never a target, so its weight is not used.

        Raises:
            ValueError: no document, an empty one, tokens that are no whole numbers from 0, or weights of another
                length.
        """
        if not documents or any(len(document) == 0 for document in documents):
            raise ValueError("a pack needs at least one document, and each document at least one token")
        if any(not isinstance(d, Tensor) or d.dtype not in _WHOLE for d in documents):
            raise ValueError("tokens must be whole numbers: a tensor of an integer dtype")
        if weights is None:
            weights = [torch.ones(len(document)) for document in documents]
        if [len(w) for w in weights] != [len(d) for d in documents]:
            raise ValueError("weights must have the lengths of their documents")
        targets, shifted = [], []
        for document, weight in zip(documents, weights, strict=True):
            targets.append(torch.cat([document[1:].long(), torch.tensor([NO_TARGET])]))
            shifted.append(torch.cat([weight[1:].float(), torch.zeros(1)]))
        lengths = torch.tensor([0] + [len(document) for document in documents])
        return cls(
            tokens=torch.cat([document.long() for document in documents]),
            targets=torch.cat(targets),
            weight=torch.cat(shifted),
            starts=lengths.cumsum(0),
        )

    @classmethod
    def without_target(cls) -> Pack:
        """One token that predicts nothing: for a rank that has no pack of its own where others have."""
        return cls.from_documents([torch.zeros(1, dtype=torch.int64)])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> Int[Tensor, "S"]:
        """Tokens of each document."""
        return self.starts.diff()

    @cached_property
    def offsets(self) -> Int[Tensor, "T"]:
        """Tokens of the same document before each position; the target at t has `offsets[t] + 1` before it."""
        return torch.arange(len(self)) - self.starts[:-1].repeat_interleave(self.lengths)

    def indexer_rows(self, kpool: int) -> int:
        """Rows that see at least one complete pool: the denominator of the indexer's loss."""
        return int((self.lengths - (kpool - 1)).clamp(min=0).sum())
