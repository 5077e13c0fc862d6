"""Train, validation and held-out parts that share no letter, on either strand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from longstrand.data.documents import Stretches
from longstrand.data.store import Store
from longstrand.errors import UserError

TRAIN, VALIDATION, HELD_OUT = range(3)
PART_NAMES = ("train", "validation", "held_out")
PartName = Literal["train", "validation", "held_out"]


def split_units(
    units: np.ndarray, sizes: np.ndarray, shares: tuple[float, float], seed: int, what: str
) -> np.ndarray:
    """int64 per entry: TRAIN, VALIDATION or HELD_OUT, the same for all entries of a unit.

    Units are drawn in random order; the held-out part, then validation, takes each unit that still fits its share of
    all letters, and the smallest unit where none fits. The largest unit trains.

    Args:
        units: the unit (record, family) of each entry.
        sizes: letters of each entry.
        shares: of validation and of held-out, each 0..1.

    Raises:
        UserError: fewer units than parts.
    """
    names, entry_unit = np.unique(units, return_inverse=True)
    unit_sizes = np.bincount(entry_unit, sizes, minlength=len(names)).astype(np.int64)
    wanted = [(part, share) for part, share in ((HELD_OUT, shares[1]), (VALIDATION, shares[0])) if share > 0]
    if len(names) < len(wanted) + 1:
        raise UserError(
            f"data.split: {len(names)} {what}{'' if len(names) == 1 else 's'} cannot fill {len(wanted) + 1} parts; "
            'give more records, or split.by = "region"'
        )
    part_of = np.full(len(names), TRAIN)
    order = np.random.default_rng(seed).permutation(len(names))
    largest = unit_sizes.argmax()  # it always trains
    free = [int(unit) for unit in order if unit != largest]
    for later, (part, share) in enumerate(wanted, start=1):
        room = share * unit_sizes.sum()
        spare = len(free) - (len(wanted) - later)  # at least one unit is left for each part to come
        chosen: list[int] = []
        for unit in free:
            if unit_sizes[unit] <= room and len(chosen) < spare:
                chosen.append(unit)
                room -= unit_sizes[unit]
        chosen = chosen or [min(free, key=lambda unit: unit_sizes[unit])]
        part_of[chosen] = part
        free = [unit for unit in free if part_of[unit] == TRAIN]
    return part_of[entry_unit]


def split_regions(
    stretches: Stretches, shares: tuple[float, float]
) -> tuple[Stretches, np.ndarray, np.ndarray]:
    """Cuts each stretch into train, validation and held-out, in this order: (pieces, the part of each, their origin).

    The held-out part is the last `shares[1]` of a stretch's letters (rounded down), validation what stands before it.
    """
    held_out = (stretches.lengths * shares[1]).astype(np.int64)
    validation = (stretches.lengths * shares[0]).astype(np.int64)
    borders = np.stack(
        [stretches.start, stretches.end - held_out - validation, stretches.end - held_out, stretches.end],
        axis=1,
    )
    origin = np.repeat(np.arange(len(stretches)), 3)
    part_of = np.tile([TRAIN, VALIDATION, HELD_OUT], len(stretches))
    start, end = borders[:, :3].ravel(), borders[:, 1:].ravel()
    kept = np.flatnonzero(end > start)
    pieces = Stretches(stretches.store[origin], start, end, stretches.turned[origin]).take(kept)
    return pieces, part_of[kept], origin[kept]


def records_of(stores: Sequence[Store], stretches: Stretches) -> np.ndarray:
    """int64 per stretch: its record, counted over all stores."""
    first = np.cumsum([0, *(store.num_records for store in stores)])
    found = np.empty(len(stretches), np.int64)
    for index in np.unique(stretches.store):
        own = stretches.store == index
        found[own] = (
            first[index] + np.searchsorted(stores[index].starts, stretches.start[own], side="right") - 1
        )
    return found


def contents_of(stores: Sequence[Store], stretches: Stretches) -> np.ndarray:
    """bytes16 per stretch: the hash of its whole record, equal for equal records on either strand."""
    contents = np.concatenate([store.content for store in stores])
    return np.ascontiguousarray(contents[records_of(stores, stretches)]).view("V16").ravel()


def check_apart(
    stores: Sequence[Store], stretches: Stretches, part_of: np.ndarray, names: Sequence[str] = PART_NAMES
) -> None:
    """Asserts that no letter stands in two parts of the split: same record content, same place, either strand.

    Raises:
        UserError: two stretches that overlap, with both places.
    """
    if not len(stretches):
        return
    records = records_of(stores, stretches)
    starts = np.concatenate([store.starts[:-1] for store in stores])
    lengths = np.concatenate([np.diff(store.starts) for store in stores])
    flipped = np.concatenate([store.flipped for store in stores])[records]
    offset, length = starts[records], lengths[records]
    start = np.where(flipped, offset + length - stretches.end, stretches.start - offset)
    end = start + stretches.lengths
    _, group = np.unique(contents_of(stores, stretches), return_inverse=True)
    axis = group * (int(lengths.max()) + 1)
    order = np.argsort(start + axis, kind="stable")
    start, end, part = (start + axis)[order], (end + axis)[order], part_of[order]
    for one in np.unique(part):
        reach = np.maximum.accumulate(np.where(part == one, end, -1))
        clash = np.flatnonzero((part[1:] != one) & (reach[:-1] > start[1:])) + 1
        if len(clash):
            later = int(clash[0])
            earlier = int(np.flatnonzero((part == one) & (end == reach[later - 1]))[0])
            places = [_place(stores, stretches, int(order[at])) for at in (earlier, later)]
            raise UserError(
                f"data: {places[0]} ({names[part[earlier]]}) and {places[1]} ({names[part[later]]}) overlap; "
                "training and evaluation must not share letters: change the regions or the split"
            )


def _place(stores: Sequence[Store], stretches: Stretches, at: int) -> str:
    store = stores[stretches.store[at]]
    record = store.record_at(int(stretches.start[at]))
    offset = int(store.starts[record])
    return f"{store.source} {store.names[record]}:{stretches.start[at] - offset + 1}-{stretches.end[at] - offset}"
