"""Places in a FASTA: samtools-style regions (from 1, inclusive) and BED lines (from 0, half-open)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longstrand.data.documents import Stretches
from longstrand.data.store import Store
from longstrand.data.text_lines import read_lines
from longstrand.errors import UserError

_SPAN = re.compile(r"([0-9,]{1,30})(-([0-9,]{1,30})?)?")


@dataclass(frozen=True, slots=True)
class Region:
    """`[start, end)` of the record `name`, from 0; `end` None is the record's end; `where` is for messages."""

    name: str
    start: int
    end: int | None
    where: str


def read_bed(path: Path) -> list[Region]:
    """The intervals of a BED file (plain or gzip), in its order.

    Columns after the third (name, score, strand, ...) choose no letters and are not used. Blank lines, comments and
    `track` / `browser` lines are no intervals.

    Raises:
        UserError: a line without three columns, a bound that is no whole number, an empty or reversed interval, a
            file without intervals; with its line.
    """
    regions = []
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        words = line.split("\t") if "\t" in line else line.split()
        if not words or not words[0].strip() or words[0].startswith("#") or words[0] in ("track", "browser"):
            if words and not words[0].strip() and len(words) > 1:
                raise UserError(f"{where}: the first column is empty; a BED line is: record, start, end")
            continue
        if len(words) < 3:
            raise UserError(
                f"{where}: {len(words)} columns; a BED line has at least three: record, start, end"
            )
        start, end = (_bound(word, where) for word in words[1:3])
        if start >= end:
            raise UserError(
                f"{where}: start {start} is not below end {end}; BED counts from 0 and excludes the end"
            )
        regions.append(Region(words[0], start, end, where))
    if not regions:
        raise UserError(f"{path}: no interval; a BED file needs at least one line: record, start, end")
    return regions


def read_regions(texts: Sequence[str], stores: Sequence[Store]) -> list[Region]:
    """Parses "name", "name:start", "name:start-" and "name:start-end"; a record's full name wins over a span.

    Raises:
        UserError: a span that is not two numbers from 1 in order.
    """
    names = {name for store in stores for name in store.names}
    regions = []
    for text in texts:
        where = f"region {text!r}"
        name, colon, span = text.rpartition(":")
        if text in names or not colon:
            regions.append(Region(text, 0, None, where))
            continue
        match = _SPAN.fullmatch(span)
        if match is None:
            raise UserError(f"{where}: {span!r} is not a span; write {name}:START-END, from 1, end included")
        start = int(match[1].replace(",", "") or 0)
        end = int(match[3].replace(",", "") or 0) if match[3] else None
        if start < 1 or (end is not None and end < start):
            raise UserError(f"{where}: the span must start at 1 or later and not end before it starts")
        regions.append(Region(name, start - 1, end, where))
    return regions


def locate(regions: Sequence[Region], stores: Sequence[Store]) -> tuple[Stretches, int]:
    """(the regions as stretches, sorted; letters that several of them named): overlapping regions become one.

    Raises:
        UserError: a record that no file has or that several have, or a region past its record's end.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for index, store in enumerate(stores):
        for record, name in enumerate(store.names):
            places.setdefault(name, []).append((index, record))
    found = np.empty((len(regions), 3), np.int64)
    for number, region in enumerate(regions):
        index, record = _only_place(region, places.get(region.name, []), stores)
        offset, record_end = (int(x) for x in stores[index].starts[record : record + 2])
        end = record_end - offset if region.end is None else region.end
        if end > record_end - offset or region.start >= record_end - offset:
            raise UserError(
                f"{region.where}: ends at {max(end, region.start + 1):,}, but record {region.name!r} has "
                f"{record_end - offset:,} letters ({stores[index].source})"
            )
        found[number] = index, offset + region.start, offset + end
    return _merge(found)


def _merge(found: np.ndarray) -> tuple[Stretches, int]:
    """Sorted stretches without overlap, and how many letters were named more than once; touching ones stay apart."""
    store, start, end = found[np.lexsort((found[:, 2], found[:, 1], found[:, 0]))].T
    span = int(end.max(initial=0)) + 1
    reach = np.maximum.accumulate(end + store * span)  # records do not share positions, so one axis will do
    opens = np.ones(len(start), bool)
    opens[1:] = (start + store * span)[1:] >= reach[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start)) - 1 if len(first) else first
    merged_end = reach[last] - store[first] * span
    stretches = Stretches(store[first], start[first], merged_end, np.zeros(len(first), bool))
    return stretches, int((end - start).sum() - stretches.lengths.sum())


def _only_place(region: Region, places: list[tuple[int, int]], stores: Sequence[Store]) -> tuple[int, int]:
    if not places:
        known = [name for store in stores for name in store.names[:5]][:5]
        raise UserError(
            f"{region.where}: no record is named {region.name!r}; the files have {', '.join(map(repr, known))}, ..."
        )
    if len(places) > 1:
        lines = " and ".join(
            f"{stores[index].source}:{stores[index].lines[record]}" for index, record in places[:2]
        )
        raise UserError(
            f"{region.where}: {len(places)} records are named {region.name!r} ({lines}); rename all but one"
        )
    return places[0]


def _bound(word: str, where: str) -> int:
    if not (word.isascii() and word.strip().isdigit() and len(word) <= 30):
        raise UserError(
            f"{where}: {word[:30]!r} is not a position; a BED line is: record, start, end (whole numbers)"
        )
    return int(word)
