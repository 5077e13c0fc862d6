"""From the sources of a recipe to stretches of stores: what is read, what is chosen, which part of the split it is."""

from __future__ import annotations

import glob
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from longstrand.config import DataSection, Source
from longstrand.data.documents import Stretches
from longstrand.data.families import Families, find_families
from longstrand.data.ingest import Kind, kind_of_file, open_fasta, open_jsonl, open_tokens
from longstrand.data.letters import LetterPolicy
from longstrand.data.regions import locate, read_bed, read_regions
from longstrand.data.splits import TRAIN, contents_of, records_of, split_regions, split_units
from longstrand.data.store import Store
from longstrand.data.tokens import TextTokenizer
from longstrand.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Input:
    """One source: its files and what its regions choose of them.

    Attributes:
        stores: which of the stores are its files.
        num_values: letters (tokens, for JSONL) of its files.
        named_twice: letters that several of its regions named.
    """

    source: Source
    kind: Kind
    stores: tuple[int, ...]
    num_values: int
    named_twice: int


@dataclass(frozen=True)
class Selection:
    """The chosen stretches of all sources.

    Attributes:
        source_of: int64[N], the source of each stretch.
        part_of: int64[N], its part of the split (TRAIN, VALIDATION, HELD_OUT).
        label: int64[N], its family; empty where no families were looked for.
        families: of the stretches before any split, or None.
    """

    inputs: tuple[Input, ...]
    stores: list[Store]
    stretches: Stretches
    source_of: np.ndarray
    part_of: np.ndarray
    label: np.ndarray
    families: Families | None = None

    def of(self, source: int, part: int) -> np.ndarray:
        """Indices of one source's stretches in one part of the split."""
        return np.flatnonzero((self.source_of == source) & (self.part_of == part))

    def num_records(self, chosen: np.ndarray) -> int:
        """How many records the chosen stretches are of."""
        return len(np.unique(records_of(self.stores, self.stretches.take(chosen))))


def select(section: DataSection, cache: Path, tokenizer: TextTokenizer | None) -> Selection:
    """Opens all sources, chooses their regions, finds families and splits.

    Raises:
        UserError: no such file, mixed kinds, a setting that a kind of file cannot have, or what the readers raise.
    """
    stores: list[Store] = []
    inputs, stretches = [], []
    for source in section.sources:
        entry, own = _open_source(source, section, cache, tokenizer, stores)
        inputs.append(entry)
        stretches.append(own)
    joined = Stretches.joined(stretches)
    nothing = np.empty(0, np.int64)
    source_of = np.repeat(np.arange(len(stretches)), [len(own) for own in stretches])
    selection = Selection(tuple(inputs), stores, joined, source_of, np.full(len(joined), TRAIN), nothing)
    if section.families is not None or (section.split is not None and section.split.by == "family"):
        selection = _with_families(section, selection)
    return selection if section.split is None else _with_split(section, selection)


def tokenized(selection: Selection, tokenizer: TextTokenizer, policy: LetterPolicy, cache: Path) -> Selection:
    """The same stretches as tokens: each one of a letter store becomes one record of a token store.

    Raises:
        UserError: the tokenizer makes nothing of a stretch.
    """
    stores = list(selection.stores)
    old = selection.stretches
    store, start, end, turned = (array.copy() for array in (old.store, old.start, old.end, old.turned))
    for index, letters in enumerate(selection.stores):
        own = np.flatnonzero(old.store == index)
        if not letters.holds_letters or not len(own):
            continue
        tokens = open_tokens(letters, old.take(own), tokenizer, policy, cache)
        if tokens.num_records != len(own):
            raise UserError(
                f"{letters.source}: the tokenizer {tokenizer.path} makes no token of some stretch of it"
            )
        store[own], turned[own] = len(stores), False
        start[own], end[own] = tokens.starts[:-1], tokens.starts[1:]
        stores.append(tokens)
    return replace(selection, stores=stores, stretches=Stretches(store, start, end, turned))


def _open_source(
    source: Source, section: DataSection, cache: Path, tokenizer: TextTokenizer | None, stores: list[Store]
) -> tuple[Input, Stretches]:
    """Opens one source's files, appending them to `stores`."""
    paths = _expand(source.path)
    kinds = {path: kind_of_file(path) if source.format == "auto" else source.format for path in paths}
    kind = kinds[paths[0]]
    if other := [path for path in paths if kinds[path] != kind]:
        raise UserError(
            f"data.sources: {source.path!r} matches {paths[0]} ({kind}) and {other[0]} ({kinds[other[0]]}); "
            "give each kind a source of its own"
        )
    _refuse_settings(source, section, kind)
    opened = [
        open_fasta(path, cache) if kind == "fasta" else open_jsonl(path, cache, tokenizer, kind == "tokens")
        for path in paths
    ]
    indices = range(len(stores), len(stores) + len(opened))
    stores += opened
    stretches, named_twice = _choose(source, opened)
    stretches = replace(stretches, store=stretches.store + indices.start)
    num_values = sum(len(store.values) for store in opened)
    return Input(source, kind, tuple(indices), num_values, named_twice), stretches


def _choose(source: Source, stores: Sequence[Store]) -> tuple[Stretches, int]:
    """The regions of a source, or all its records; stores are counted within the source."""
    if source.bed is not None:
        return locate(read_bed(Path(source.bed).expanduser()), stores)
    if source.regions:
        return locate(read_regions(source.regions, stores), stores)
    index = np.repeat(np.arange(len(stores)), [store.num_records for store in stores])
    start = np.concatenate([store.starts[:-1] for store in stores])
    end = np.concatenate([store.starts[1:] for store in stores])
    return Stretches(index, start, end, np.zeros(len(index), bool)), 0


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not found:
        raise UserError(
            f"data.sources: no file matches {pattern!r}; correct the path (relative to {Path.cwd()})"
        )
    return found


def _refuse_settings(source: Source, section: DataSection, kind: Kind) -> None:
    """Settings that only nucleotide records can have."""
    if kind == "fasta":
        return
    by = section.split.by if section.split is not None else "record"
    wanted = {
        "regions": bool(source.regions),
        "bed": source.bed is not None,
        "reverse_complement": section.reverse_complement,
        "families": section.families is not None,
        f'split.by = "{by}"': by != "record",
    }
    for name, is_set in wanted.items():
        if is_set:
            raise UserError(
                f"data: {source.path} is {kind}, and {name} is for FASTA; remove it or the source"
            )


def _with_families(section: DataSection, selection: Selection) -> Selection:
    k = section.families.kmer if section.families is not None else 31
    stretches = selection.stretches
    views = [
        selection.stores[store].values[start:end]
        for store, start, end in zip(stretches.store, stretches.start, stretches.end, strict=True)
    ]
    _log.info("looking for families: %d records, %d letters", len(views), stretches.lengths.sum())
    families = find_families(views, k)
    turned = families.turned if section.families is not None else stretches.turned
    return replace(
        selection, stretches=replace(stretches, turned=turned), label=families.label, families=families
    )


def _with_split(section: DataSection, selection: Selection) -> Selection:
    split = section.split
    assert split is not None
    shares = (split.validation, split.held_out)
    stretches = selection.stretches
    if split.by == "region":
        stretches, part_of, origin = split_regions(stretches, shares)
        return replace(selection, stretches=stretches, source_of=selection.source_of[origin], part_of=part_of)
    units = selection.label if split.by == "family" else contents_of(selection.stores, stretches)
    # Units are numbered in the order of their names; contents are hashes, so that order does not follow the files'.
    part_of = split_units(units, stretches.lengths, shares, split.seed, split.by)
    return replace(selection, part_of=part_of)
