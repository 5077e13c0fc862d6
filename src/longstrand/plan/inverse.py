"""Turned around: the longest sequence on these devices, the fewest devices for this length, and a row per length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

from longstrand.errors import UserError
from longstrand.plan.job import Job
from longstrand.plan.room import Room, missing, room_left
from longstrand.plan.search import Plan, levers_for, reach, search, without_levers

LENGTHS = 1024
"""Lengths that are searched are multiples of it."""

LONGEST = 2**32
"""Tokens beyond which nothing is searched."""

MOST_HOSTS = 4096

MOST_LENGTHS = 13
"""Of a sweep, from the first to 4,096 times that; a plan takes up to 0.12 s."""


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits.

    Attributes:
        plan: of that length.
        next_plan: of the next length that was tried, which does not fit; None: the search ended at `LONGEST`.
    """

    plan: Plan
    next_plan: Plan | None


@dataclass(frozen=True)
class Fewest:
    """The fewest devices on which a length fits.

    Attributes:
        plan: on them; where no number suffices, on the one that leaves least over the limits.
        most_tried: the largest number that was tried: one host, doubled.
    """

    plan: Plan
    most_tried: int


def longest_sequence(job: Job, room: Room) -> Longest | None:
    """The longest sequence, rounded down to a multiple of 1,024 tokens, with whatever levers it takes.

    It is looked for near the longest with levers that leave most room; whether a length fits is what `search` says of
    it. None: not even 1,024 tokens fit.
    """

    def fits(length: int) -> bool:
        return not missing(_reached(job, room, length), room)

    if not fits(LENGTHS):
        return None
    near = _longest_with_most_room(job, room)
    if near + LENGTHS == LONGEST and fits(LONGEST):
        return Longest(search(replace(job, length=LONGEST), room), None)
    found = _last(fits, LENGTHS, near)
    plan = search(replace(job, length=found), room)
    return Longest(plan, search(replace(job, length=found + LENGTHS), room))


def fewest_devices(job: Job, room: Room) -> Fewest:
    """As few devices as the length fits on: any number up to one host, whole hosts above.

    Hosts are doubled until it fits, and then those between are tried by halves.
    """
    per_host, over = room.device.devices_per_host, dict[int, int]()

    def fits(number: int) -> bool:
        there = replace(room, num_devices=number)
        base = without_levers(job, there)
        over[number] = sum(missing(reach(base, there, levers_for(base, there)), there).values())
        return not over[number]

    if fits(per_host):
        number = next(number for number in range(1, per_host + 1) if fits(number))
        return Fewest(search(job, replace(room, num_devices=number)), per_host)
    most = min(MOST_HOSTS, max(1, job.length // 2 // per_host))
    low, high = 1, min(2, most)
    while high > low and not fits(high * per_host):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * per_host) else (middle, high)
    best = min(over, key=lambda number: (over[number], number))
    return Fewest(search(job, replace(room, num_devices=best)), max(over))


def sweep(job: Job, room: Room, lengths: list[int]) -> list[Plan]:
    """A plan per length."""
    return [search(replace(job, length=length), room) for length in lengths]


def doubling_lengths(first: int, last: int) -> list[int]:
    """From the first length to the last by doubling; the last always belongs to them.

    Raises:
        UserError: they do not ascend, or are too many.
    """
    if first > last:
        raise UserError(f"--sweep {first}..{last}: must ascend, such as 16k..4M; swap the two")
    lengths = [first]
    while lengths[-1] * 2 < last:
        lengths.append(lengths[-1] * 2)
    lengths += [last] * (last > first)
    if len(lengths) > MOST_LENGTHS:
        raise UserError(
            f"--sweep {first}..{last}: has {len(lengths)} lengths, and at most {MOST_LENGTHS} are planned, up to "
            f"{2 ** (MOST_LENGTHS - 1):,} times the first; bring the two closer"
        )
    return lengths


@lru_cache(maxsize=64)
def _reached(job: Job, room: Room, length: int) -> Job:
    base = without_levers(replace(job, length=length), room)
    return reach(base, room, levers_for(base, room))


def _longest_with_most_room(job: Job, room: Room) -> int:
    """The longest length with the levers that leave most room just beyond it, from the longest without any on.

    First among lengths of whole tiles alone, which are planned in less time.
    """
    levers = without_levers(replace(job, length=LONGEST), room)
    longest = _longest_with(levers, room, LENGTHS, _whole_tiles(levers))
    for unit in (_whole_tiles, lambda _: LENGTHS):
        longest, levers = _grown(longest, levers, room, unit)
    return longest


def _grown(longest: int, levers: Job, room: Room, unit: Callable[[Job], int]) -> tuple[int, Job]:
    """A length and its levers, with the roomiest of a unit beyond it in their place; again while it grows."""
    before = 0
    while before < longest:
        before = longest
        levers = _roomiest(replace(levers, length=longest + unit(levers)), room)
        longest = _longest_with(levers, room, longest, unit(levers))
    return longest, levers


def _whole_tiles(job: Job) -> int:
    """Of the lengths that are searched, the least that is whole tiles on each rank."""
    return lcm(LENGTHS, job.parallel.context * job.segments * job.memory.tile)


def _roomiest(job: Job, room: Room) -> Job:
    """Lever by lever, off or among its strongest, the value that leaves most room; again while that helps."""
    levers, best, before = levers_for(without_levers(job, room), room), room_left(job, room), None
    while job != before:
        before = job
        for lever in levers:
            for value in (lever.values[0], *lever.tried):
                candidate = lever.put(job, value)
                if (left := room_left(candidate, room)) > best:
                    job, best = candidate, left
    return job


def _longest_with(levers: Job, room: Room, fitting: int, step: int) -> int:
    """The largest multiple of `step` that fits with these levers; `fitting` where only others fit, or none does.

    Bytes grow nearly in proportion to the length: where the line from one end to the other meets the limit is close.
    An end that stays counts half the next time, so that both close in (Illinois). Where a limit is met exactly
    there is no such line, and the middle is tried.
    """

    def left(length: int) -> int:
        return room_left(replace(levers, length=length), room)

    low, high = fitting, LONGEST
    at_low, at_high, stayed = float(left(low)), float(left(high)), 0
    if at_low < 0:
        return fitting
    if at_high >= 0:
        return LONGEST - LENGTHS
    while (least := (low // step + 1) * step) < high:
        part = at_low / (at_low - at_high) if at_low > 0 else 0.5
        near = (low + int((high - low) * part)) // step * step
        length = min(max(near, least), (high - 1) // step * step)
        found = left(length)
        if found >= 0:
            low, at_low, at_high = length, found, at_high / (2 if stayed == 1 else 1)
            stayed = 1
        else:
            high, at_high, at_low = length, found, at_low / (2 if stayed == -1 else 1)
            stayed = -1
    return low


def _last(fits: Callable[[int], bool], low: int, near: int) -> int:
    """The last multiple of `LENGTHS` that fits; `low` where nothing above it does.

    Steps from a length nearby that grow eightfold soon have it between them.
    """
    high, at, step = LONGEST, near, LENGTHS
    upward = fits(near)
    while low <= at < high:
        low, high = (at, high) if fits(at) else (low, at)
        if (low == at) != upward:
            break
        at, step = (at + step if upward else at - step), 8 * step
    while high - low > LENGTHS:
        middle = (low + high) // 2 // LENGTHS * LENGTHS
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
