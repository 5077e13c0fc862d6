"""The letters of DNA and what each of them becomes: the alphabet, the reading policy, the other strand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

ALPHABET = b"ACGTUNRYSWKMBDHV"
"""The 16 IUPAC nucleotide letters; as a token, a letter is its own ASCII code."""
OTHER_IUPAC = b"RYSWKMBDHVryswkmbdhv"
READ_AS_N = b"Xx-.*?"
"""Not a nucleotide but common in nucleotide files (mask, gap, stop, unknown): the position is kept and read as N."""
ACCEPTED = ALPHABET + ALPHABET.lower() + READ_AS_N

_COMPLEMENT = bytes.maketrans(b"ACGTUNRYSWKMBDHVacgtunryswkmbdhv", b"TGCAANYRSWMKVHDBtgcaanyrswmkvhdb")
_RNA_COMPLEMENT = _COMPLEMENT.replace(b"T", b"U").replace(b"t", b"u")


@dataclass(frozen=True)
class LetterPolicy:
    """What a letter counts for.

    Attributes:
        case: "ignore", or the loss weight of lower-case letters (soft-masked repeats).
        n: "mask" gives N no loss, "keep" trains on it.
        iupac: other IUPAC letters are read as N, kept as they are, or refused.
    """

    case: Literal["ignore"] | float = "ignore"
    n: Literal["mask", "keep"] = "mask"
    iupac: Literal["n", "keep", "error"] = "n"

    def normal(self) -> np.ndarray:
        """uint8[256]: the upper-case letter of `ALPHABET` that each accepted byte is read as; 0 elsewhere."""
        table = np.zeros(256, np.uint8)
        table[list(ALPHABET + ALPHABET.lower())] = list(ALPHABET * 2)
        table[list(READ_AS_N if self.iupac == "keep" else READ_AS_N + OTHER_IUPAC)] = ord("N")
        return table

    def is_n(self) -> np.ndarray:
        """bool[256]: bytes that are read as N."""
        return self.normal() == ord("N")

    def weights(self) -> np.ndarray:
        """float32[256]: the loss weight of each byte as a target."""
        weights = np.ones(256, np.float32)
        if self.case != "ignore":
            weights[ord("a") : ord("z") + 1] = self.case
        if self.n == "mask":
            weights[self.is_n()] = 0
        return weights


def reverse_complement(letters: np.ndarray) -> np.ndarray:
    """The other strand, 5' to 3'; case stays with its position.

    A pairs with T, or with U where the stretch holds U and no T.
    """
    text = letters.tobytes()
    rna = (b"U" in text or b"u" in text) and not (b"T" in text or b"t" in text)
    turned = text.translate(_RNA_COMPLEMENT if rna else _COMPLEMENT)
    return np.frombuffer(turned, np.uint8)[::-1]


def show_letter(byte: int) -> str:
    """The letter as a reader of a message sees it."""
    return repr(chr(byte)) if 32 < byte < 127 else f"byte 0x{byte:02x}"
