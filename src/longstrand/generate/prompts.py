"""Prompts from FASTA, JSONL or the command line, and generated tokens back to letters or text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from longstrand.data.fasta import Header, read_fasta
from longstrand.data.ingest import kind_of_file
from longstrand.data.letters import ALPHABET, LetterPolicy
from longstrand.data.text_lines import read_lines
from longstrand.data.tokens import TextTokenizer
from longstrand.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """What a sequence begins with; `where` is for messages."""

    name: str
    text: str
    tokens: Int[Tensor, "T"]
    where: str


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str, where: str) -> Int[Tensor, "T"]: ...

    def decode(self, tokens: Int[Tensor, "T"]) -> str: ...


class LetterCodec:
    """One token per letter.

    Args:
        ids: int64[256], the token of each upper-case letter, -1 where it has none (`data.tokens.letter_ids`).

    Attributes:
        read_as_n: letters so far that the policy reads as N.
    """

    def __init__(self, policy: LetterPolicy, ids: np.ndarray) -> None:
        self._normal, self._ids, self.policy = policy.normal(), ids, policy
        self._letters = {int(ids[letter]): chr(letter) for letter in reversed(ALPHABET) if ids[letter] >= 0}
        self.read_as_n = 0

    def encode(self, text: str, where: str) -> Int[Tensor, "T"]:
        """Case is ignored; other IUPAC letters are read as the policy says.

        Raises:
            UserError: a character that is no nucleotide letter, that the policy refuses, or that has no token.
        """
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        letters = np.where(points < 256, points, 0)
        normal = self._normal[letters]
        as_n = (normal == ord("N")) & (letters != ord("N")) & (letters != ord("n"))
        refused = normal == 0
        if self.policy.iupac == "error":
            refused |= as_n
        ids = np.where(refused, 0, self._ids[normal])
        if refused.any():
            self._refuse(text, int(refused.argmax()), where, "is not a nucleotide letter that is read")
        if (ids < 0).any():
            self._refuse(text, int((ids < 0).argmax()), where, "has no token of its own in the model")
        self.read_as_n += int(as_n.sum())
        return torch.from_numpy(ids.astype(np.int64))

    def decode(self, tokens: Int[Tensor, "T"]) -> str:
        return "".join(self._letters[token] for token in tokens.tolist())

    def allowed(self, letters: str) -> tuple[int, ...]:
        """Token ids of the (upper-case) letters that may be drawn.

        Raises:
            UserError: no letter, one that stands twice, is not of the alphabet, or has no token.
        """
        for letter in letters:
            rule = "is no nucleotide letter"
            if letters.count(letter) > 1:
                rule = "stands twice"
            elif letter in ALPHABET.decode():
                if self._ids[ord(letter)] >= 0:
                    continue
                rule = "has no token of its own in the model"
            raise UserError(
                f"--letters {letters}: {letter!r} {rule}; name letters of {ALPHABET.decode()}, each once"
            )
        if not letters:
            raise UserError('--letters "": no letter could be drawn; the default is ACGT')
        return tuple(int(self._ids[ord(letter)]) for letter in letters)

    def _refuse(self, text: str, at: int, where: str, rule: str) -> None:
        raise UserError(f"{where}: letter {at + 1:,}, {text[at]!r}, {rule}; correct the prompt")


class TextCodec:
    """A Hugging Face tokenizer under the cut rule; `unknown_tokens` counts what it does not know."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer, self.unknown_tokens = tokenizer, 0

    def encode(self, text: str, where: str) -> Int[Tensor, "T"]:
        ids = self.tokenizer.encode(text, where).ids
        self.unknown_tokens += self.tokenizer.num_unknown(ids)
        return torch.from_numpy(ids.astype(np.int64))

    def decode(self, tokens: Int[Tensor, "T"]) -> str:
        return self.tokenizer.decode(tokens.tolist())


def read_prompts(files: Sequence[Path], texts: Sequence[str], codec: Codec) -> list[Prompt]:
    """The prompts of the files, in their order, then those given as text; every record or row is one.

    Raises:
        UserError: a file that cannot be read, a prompt without a token, or no prompt at all.
    """
    given = [each for file in files for each in _read_file(file)]
    given += [(f"prompt{n}", text, f"--prompt {n}") for n, text in enumerate(texts, start=1)]
    if not given:
        raise UserError("no prompt: name a file of prompts, or give one with --prompt")
    prompts = []
    for name, (_, text, where) in zip(_unique([name for name, _, _ in given]), given, strict=True):
        if isinstance(codec, LetterCodec) and len(name.split()) > 1:
            raise UserError(f'{where}: "id" = {name!r}: a FASTA name is one word; replace its spaces')
        tokens = codec.encode(text, where)
        if not len(tokens):
            raise UserError(
                f"{where}: the prompt is empty, and the model has no token that begins a sequence"
            )
        prompts.append(Prompt(name, text, tokens, where))
    return prompts


def _read_file(path: Path) -> Iterator[tuple[str, str, str]]:
    """(name, text, where) of each record of a FASTA or row of a JSONL file."""
    kind = kind_of_file(path)
    if kind == "tokens":
        raise UserError(f"{path}: holds input_ids; a prompt is letters or text, in FASTA or JSONL")
    return _read_records(path) if kind == "fasta" else _read_rows(path)


def _read_records(path: Path) -> Iterator[tuple[str, str, str]]:
    header: Header | None = None
    pieces: list[bytes] = []
    for item in chain(read_fasta(path), [None]):
        if isinstance(item, bytes):
            pieces.append(item)
            continue
        if header is not None:
            where = f"{path}:{header.line}, record {header.name or '(without a name)'}"
            yield header.name, b"".join(pieces).decode("ascii"), where
        header, pieces = item, []


def _read_rows(path: Path) -> Iterator[tuple[str, str, str]]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: cannot be read as JSON ({error})") from error
        given = [key for key in ("prompt", "text") if isinstance(row, dict) and key in row]
        if len(given) != 1 or not isinstance(row[given[0]], str):
            raise UserError(f'{where}: a row of prompts is an object with "prompt" or "text", a text')
        yield _row_name(row.get("id"), where) or f"row{number}", row[given[0]], where


def _row_name(given: Any, where: str) -> str:
    """A row's id as a name; it stands on a line of its own in FASTA."""
    if given is None:
        return ""
    if isinstance(given, bool) or not isinstance(given, str | int | float) or not str(given).isprintable():
        raise UserError(
            f'{where}: "id" = {given!r}: must be a text of one line or a number; correct or remove it'
        )
    return str(given)


def _unique(names: Sequence[str]) -> list[str]:
    """Names that tell apart: an empty one is called after its place, a repeated one is numbered."""
    given = [name or f"prompt{n}" for n, name in enumerate(names, start=1)]
    counts = Counter(given)
    taken = {name for name in given if counts[name] == 1}
    unique = []
    for name in given:
        if counts[name] > 1:
            name = next(new for n in count(1) if (new := f"{name}.{n}") not in taken)
            taken.add(name)
        unique.append(name)
    return unique
