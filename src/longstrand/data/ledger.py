"""The data ledger: every record, letter and token of the input, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longstrand.data.families import Families
from longstrand.data.letters import OTHER_IUPAC, READ_AS_N, LetterPolicy
from longstrand.data.pack import NO_TARGET, Pack
from longstrand.data.reading import MASKED_LOWER, MASKED_N, MASKED_ROW, TRAINED, Reading
from longstrand.data.sequences import SequenceSet
from longstrand.data.store import Store


@dataclass
class PartLedger:
    """One source's share of one part of the split, for one epoch at the recipe's length."""

    records: int
    letters: int
    values: int
    documents: int
    tokens: int
    trained: int
    masked: dict[str, int]
    first_tokens: int
    cut_documents: int
    skipped: dict[str, tuple[int, int]]

    @classmethod
    def of(
        cls,
        reading: Reading,
        stores: Sequence[Store],
        sequences: SequenceSet,
        *,
        records: int,
        letters: int,
        values: int,
    ) -> PartLedger:
        """Counts one epoch's documents; `letters` and `values` (tokens of them) are before any is skipped."""
        documents = sequences.in_epoch(0)
        counts, first = reading.document_counts(stores, documents)
        total, firsts = counts.sum(axis=0), first.sum(axis=0)
        targets = total - firsts
        masked = {"n": MASKED_N, "lower_case": MASKED_LOWER, "not_supervised": MASKED_ROW}
        return cls(
            records=records,
            letters=letters,
            values=values,
            documents=len(documents),
            tokens=int(documents.lengths.sum()),
            trained=int(targets[TRAINED]),
            masked={name: int(targets[cause]) for name, cause in masked.items()},
            first_tokens=len(documents),
            cut_documents=sequences.num_cut,
            skipped=sequences.skipped.causes,
        )

    def missing(self) -> int:
        """Tokens that no line accounts for: 0, or a bug."""
        used = self.trained + sum(self.masked.values()) + self.first_tokens
        return self.values - used - sum(tokens for _, tokens in self.skipped.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "tokens": self.values,
            "documents": self.documents,
            "longer_than_length_cut_into_windows": self.cut_documents,
            "trained_per_epoch": self.trained,
            "masked_per_epoch": self.masked,
            "first_tokens": self.first_tokens,
            "skipped": {
                cause: {"documents": count, "tokens": tokens}
                for cause, (count, tokens) in self.skipped.items()
            },
        }


@dataclass
class Served:
    """What a loader has handed out of one source."""

    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    masked: int = 0
    no_target: int = 0

    def add(self, pack: Pack) -> None:
        has_target = pack.targets != NO_TARGET
        trained = int((has_target & (pack.weight != 0)).sum())
        self.sequences += 1
        self.documents += pack.num_documents
        self.tokens += len(pack)
        self.trained += trained
        self.masked += int(has_target.sum()) - trained
        self.no_target += int((~has_target).sum())


@dataclass
class SourceLedger:
    """Where one source's letters went: outside the regions, or into parts of the split."""

    path: str
    weight: float
    kind: str
    files: list[dict[str, Any]]
    values: int
    outside_regions: int
    named_twice: int
    read_as_n: dict[str, int]
    unknown_tokens: int
    parts: dict[str, PartLedger] = field(default_factory=dict)
    served: Served = field(default_factory=Served)

    def missing(self) -> int:
        """Letters and tokens that no line accounts for: 0, or a bug."""
        apart = self.values - self.outside_regions - sum(part.letters for part in self.parts.values())
        return abs(apart) + sum(abs(part.missing()) for part in self.parts.values())

    def why_nothing(self, part: str) -> str:
        """What became of a part of the split that shows no document."""
        if part not in self.parts:
            return "no letter of it is in this part of the split"
        causes = [
            f"{count:,} {cause.replace('_', ' ')} ({tokens:,} tokens)"
            for cause, (count, tokens) in self.parts[part].skipped.items()
        ]
        return f"{self.parts[part].letters:,} letters, skipped: {', '.join(causes) or 'none'}"

    def as_dict(self) -> dict[str, Any]:
        unit = "letters" if self.kind == "fasta" else "tokens"
        return {
            "path": self.path,
            "format": self.kind,
            "weight": self.weight,
            "files": self.files,
            unit: self.values,
            "outside_regions": self.outside_regions,
            "named_by_several_regions": self.named_twice,
            "read_as_n": self.read_as_n,
            "unknown_tokens": self.unknown_tokens,
            "split": {name: {unit: part.letters, **part.as_dict()} for name, part in self.parts.items()},
            "shown_in_training": vars(self.served),
        }


@dataclass
class Ledger:
    """All sources, the policies they were read under, and what the families are."""

    sources: list[SourceLedger]
    policies: dict[str, Any]
    families: dict[str, Any] | None = None

    def missing(self) -> int:
        """Letters and tokens that no line accounts for: 0, or a bug."""
        return sum(source.missing() for source in self.sources)

    def as_dict(self) -> dict[str, Any]:
        """The content of data.json."""
        return {
            "version": 1,
            "policies": self.policies,
            **({"families": self.families} if self.families else {}),
            "sources": [source.as_dict() for source in self.sources],
        }


def letters_read_as_n(stores: Sequence[Store], policy: LetterPolicy) -> dict[str, int]:
    """How many of each other letter the policy reads as N, over whole files."""
    odd = READ_AS_N if policy.iupac == "keep" else READ_AS_N + OTHER_IUPAC
    counts: dict[str, int] = {}
    for store in stores:
        for letter, count in store.facts.get("letters", {}).items():
            if ord(letter) in odd:
                counts[letter] = counts.get(letter, 0) + count
    return counts


def family_facts(families: Families) -> dict[str, Any]:
    """How many families there are, how large, and how many records were turned to their family's strand."""
    records, letters = np.bincount(families.label), np.bincount(families.label, families.lengths)
    return {
        "families": len(records),
        "single_records": int((records == 1).sum()),
        "largest": {"records": int(records.max()), "letters": int(letters[records.argmax()])},
        "records_turned_to_their_family": int(families.turned.sum()),
        "families_with_contradicting_strands": families.contradicted,
    }
