"""Generated sequences: random founders and their mutated copies, nearer or further apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BASES = np.frombuffer(b"ACGT", np.uint8)


@dataclass(frozen=True)
class Kin:
    """What generated sequences look like.

    A sequence draws its number of founders, gives each random letters, and then lays down copies of founders
    drawn at random, one after the other, until `length` letters are full (the last copy is cut). With one founder
    and no mutations that is a tandem repeat; with many, a copy's nearest relative stands about
    founders x unit letters back.

    Attributes:
        length: letters of each sequence.
        unit: shortest and longest founder, letters.
        founders: fewest and most founders of one sequence.
        substitutions: lowest and highest share of letters replaced by another one; drawn once per sequence.
        indels: share of positions at which 1-12 letters are dropped, and the same of those where some are put in.
    """

    length: int
    unit: tuple[int, int]
    founders: tuple[int, int] = (1, 1)
    substitutions: tuple[float, float] = (0.0, 0.0)
    indels: float = 0.0


def generate(kin: Kin, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence `number` of a seed, whatever was generated before: its letters, and how far they have relatives.

    Returns:
        letters: uint8[length], ASCII of A, C, G, T.
        copied: bool[length], true in every copy but the first of its founder.
    """
    random = np.random.default_rng([seed, number])
    num_founders = int(random.integers(kin.founders[0], kin.founders[1] + 1))
    sizes = random.integers(kin.unit[0], kin.unit[1] + 1, num_founders)
    founders = [BASES[random.integers(0, 4, size)] for size in sizes]
    rate = random.uniform(*kin.substitutions)
    letters, copied, seen = [], [], set()
    total = 0
    while total < kin.length:
        chosen = int(random.integers(num_founders))
        copy = mutate(founders[chosen], rate, kin.indels, random)
        letters.append(copy)
        copied.append(np.full(len(copy), chosen in seen))
        seen.add(chosen)
        total += len(copy)
    return np.concatenate(letters)[: kin.length], np.concatenate(copied)[: kin.length]


def mutate(founder: np.ndarray, rate: float, indels: float, random: np.random.Generator) -> np.ndarray:
    """A copy of uint8 letters with a share `rate` replaced by another letter, and gaps at a share of positions."""
    copy = founder.copy()
    changed = np.flatnonzero(random.random(len(copy)) < rate)
    codes = np.searchsorted(BASES, copy[changed])
    copy[changed] = BASES[(codes + random.integers(1, 4, len(changed))) % 4]
    if indels == 0:
        return copy
    pieces, start = [], 0
    for place in np.flatnonzero(random.random(len(copy)) < 2 * indels).tolist():
        if place < start:
            continue
        size = int(random.integers(1, 13))
        pieces.append(copy[start:place])
        if random.random() < 0.5:
            pieces.append(BASES[random.integers(0, 4, size)])
            start = place
        else:
            start = place + size
    pieces.append(copy[start:])
    return np.concatenate(pieces)
