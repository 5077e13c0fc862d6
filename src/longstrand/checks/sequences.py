"""Real sequences as training would read them, and random ones of the same lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.config import Recipe
from longstrand.data import Data, Pack
from longstrand.data.pack import NO_TARGET
from longstrand.data.tokens import TextTokenizer, letter_ids
from longstrand.errors import UserError


@dataclass(frozen=True)
class Letters:
    """What random tokens are drawn from, each as often as any other.

    Attributes:
        ids: int64[N].
        words: what they are.
    """

    ids: Tensor
    words: str

    @classmethod
    def of(cls, recipe: Recipe, data: Data, shape: Architecture, model_folder: Path | None) -> Letters:
        """Bases, the ids of a tokenizer, or those of the model where the data has neither letters nor a tokenizer."""
        section = recipe.data
        if section.tokenizer != "bases":
            known = TextTokenizer(section.tokenizer, section.cut).all_ids()
            ids = [token for token in known if token < shape.vocab_size]
            return cls(torch.tensor(ids), f"the {len(ids):,} tokens of {Path(section.tokenizer).name}")
        if all(source.kind == "tokens" for source in data.ledger.sources):
            return cls(torch.arange(shape.vocab_size), f"the {shape.vocab_size:,} tokens of the model")
        return cls(torch.from_numpy(letter_ids(model_folder)[list(b"ACGT")]), "A, C, G and T")

    def like(self, pack: Pack, generator: torch.Generator) -> Pack:
        """Random documents of the same lengths."""
        tokens = self.ids[torch.randint(len(self.ids), (len(pack),), generator=generator)]
        return Pack.from_documents(list(tokens.split(pack.lengths.tolist())))


def real_packs(data: Data, count: int, tokens: int | None) -> list[Pack]:
    """The first `count` sequences of training, each cut to at most `tokens`.

    Raises:
        UserError: the data repeats itself before that, or has no sequence as long as the cut.
    """
    loader, packs = data.train_loader(1), list[Pack]()
    for number in range(count):
        packs += loader.next_step()
        if any(map(_repeats, loader.state_dict()["sources"])):
            raise UserError(
                f"--sequences {count}: the recipe's data has {number} different sequence{'s' * (number != 1)} "
                f"of {data.section.length:,} tokens before one repeats; ask for as many, or lower data.length"
            )
    if tokens is None:
        return packs
    longest = max(map(len, packs))
    if tokens > longest:
        raise UserError(
            f"--tokens {tokens}: the longest of these sequences has {longest:,}, and none is made longer; lower it, or "
            "raise data.length"
        )
    return [cut(pack, tokens) for pack in packs]


def cut(pack: Pack, tokens: int) -> Pack:
    """The first tokens of a pack; its last one predicts nothing."""
    if tokens >= len(pack):
        return pack
    targets, weight = pack.targets[:tokens].clone(), pack.weight[:tokens].clone()
    targets[-1], weight[-1] = NO_TARGET, 0.0
    starts = pack.starts[pack.starts < tokens]
    return Pack(pack.tokens[:tokens], targets, weight, torch.cat([starts, starts.new_tensor([tokens])]))


def _repeats(source: dict[str, Any]) -> bool:
    """Whether a source has shown something of its second epoch."""
    return bool(source["epoch"] > 1 or (source["epoch"] == 1 and source["next"] > 0))
