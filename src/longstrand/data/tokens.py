"""Letters and text to token ids: single letters, or a Hugging Face tokenizer with the cut rule."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from longstrand.data.chat import ChatTemplate, read_chat_template
from longstrand.data.letters import ALPHABET
from longstrand.errors import UserError

MAX_UNCUT = 100_000
"""Letters in one run that go to a tokenizer without a cut rule; beyond it time may grow quadratically."""


def letter_ids(model_folder: Path | None = None) -> np.ndarray:
    """int64[256]: the token of each upper-case letter of the alphabet, -1 where it has none.

    A letter is its ASCII code, unless the model's folder brings a tokenizer.json (a released model): then it is the
    id of that letter's own token there.

    Raises:
        UserError: that tokenizer has no token of its own for A, C, G or T.
    """
    ids = np.full(256, -1, np.int64)
    path = model_folder / "tokenizer.json" if model_folder is not None else None
    if path is None or not path.exists():
        ids[list(ALPHABET)] = list(ALPHABET)
        return ids
    vocabulary = _vocabulary(path)
    for letter in ALPHABET:
        found = vocabulary.get(chr(letter))
        if type(found) is int and 0 <= found < 2**32:
            ids[letter] = found
    if missing := [chr(letter) for letter in b"ACGT" if ids[letter] < 0]:
        raise UserError(
            f"{path}: no token for the letter {missing[0]} alone; name another tokenizer in data.tokenizer"
        )
    if len(set(ids[list(b"ACGT")])) < 4:
        raise UserError(
            f"{path}: A, C, G and T do not have a token each; name another tokenizer in data.tokenizer"
        )
    return ids


@dataclass(frozen=True)
class Encoded:
    """Token ids, for each the number of characters it stands for, and characters that no token stands for."""

    ids: np.ndarray  # uint32
    widths: np.ndarray  # int64
    uncovered: int


class TextTokenizer:
    """A Hugging Face tokenizer behind the cut rule.

    The rule: in every run of non-blank characters longer than `cut`, a border stands after each `cut` characters,
    counted from the run's start; what lies between two borders is encoded alone, and the ids are joined. Words
    shorter than `cut` are untouched. No special tokens are added inside.

    Attributes:
        eos: id of the end token that the folder names, or None (also where a tokenizer.json alone is named).
        chat: the folder's chat template, or None likewise.
        fingerprint: changes whenever the ids for some text could.
    """

    def __init__(self, path: str, cut: int | None) -> None:
        folder = Path(path).expanduser()
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        self.path, self.cut = file, cut
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UserError(
                f'data.tokenizer = "{path}": {file} cannot be read ({error.strerror}); give "bases", a tokenizer.json '
                "or its folder"
            ) from error
        self._tokenizer = _load_tokenizer(data, file)
        config = _read_json(file.parent / "tokenizer_config.json") if folder.is_dir() else {}
        special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        special_tokens = {name: text for name, text in special.items() if text is not None}
        self.eos = self._id_of_eos(special["eos_token"])
        self.chat: ChatTemplate | None = (
            read_chat_template(folder, config, special_tokens) if folder.is_dir() else None
        )
        template = self.chat.source if self.chat else ""
        parts = [data, str(cut).encode(), str(self.eos).encode(), template.encode(), repr(special).encode()]
        self.fingerprint = hashlib.sha256(b"\0".join(parts)).hexdigest()

    def encode(self, text: str, where: str) -> Encoded:
        """Ids of the text under the cut rule, in time linear in its length.

        Raises:
            UserError: no cut is set and the text has a run of more than `MAX_UNCUT` characters.
        """
        encodings: list[_Encoding] = self._tokenizer.encode_batch(
            self.cut_text(text, where), add_special_tokens=False
        )
        widths = [np.diff([end for _, end in e.offsets], prepend=0) for e in encodings]
        covered = sum(end - start for e in encodings for start, end in e.offsets)
        return Encoded(
            ids=np.array([token for e in encodings for token in e.ids], np.uint32),
            widths=np.concatenate([np.empty(0, np.int64), *widths]),
            uncovered=len(text) - covered,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids)))

    def all_ids(self) -> list[int]:
        """Ids of the whole vocabulary, special tokens among them, ascending."""
        return sorted(set(self._tokenizer.get_vocab().values()))

    def cut_text(self, text: str, where: str) -> list[str]:
        """The pieces between the borders that the cut rule sets."""
        if self.cut is None:
            if len(text) > MAX_UNCUT and (run := re.search(rf"\S{{{MAX_UNCUT + 1}}}", text)):
                raise UserError(
                    f"{where}: a run of more than {MAX_UNCUT:,} characters (from character {run.start() + 1:,}); "
                    "set data.cut (letters per piece, such as 64) so that the tokenizer takes linear time"
                )
            return [text]
        borders = [0]
        for run in re.finditer(rf"\S{{{self.cut + 1},}}", text):
            borders += range(run.start() + self.cut, run.end(), self.cut)
        return [text[start:end] for start, end in zip(borders, [*borders[1:], len(text)], strict=True)]

    def num_unknown(self, ids: np.ndarray) -> int:
        """How many of the ids stand for text that has no token of its own."""
        token = getattr(self._tokenizer.model, "unk_token", None)
        unknown = self._tokenizer.token_to_id(token) if token else None
        return 0 if unknown is None else int((ids == unknown).sum())

    def _id_of_eos(self, text: str | None) -> int | None:
        if text is None:
            return None
        found: int | None = self._tokenizer.token_to_id(text)
        if found is None:
            raise UserError(
                f"{self.path.parent}: eos_token {text!r} is not in tokenizer.json; correct the folder"
            )
        return found


def spans_of(widths: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """bool per token: whether any of the characters it stands for has its flag set."""
    total = np.concatenate([[0], np.cumsum(flags)])
    ends = np.cumsum(widths)
    return (total[ends] - total[ends - widths]) > 0


class _Encoding(Protocol):
    ids: list[int]
    offsets: list[tuple[int, int]]


def _load_tokenizer(data: bytes, file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError(f"{file}: needs the tokenizers library: pip install 'longstrand[hf]'") from error
    try:
        return Tokenizer.from_buffer(data)
    except ValueError as error:
        raise UserError(f"{file}: not a tokenizer that the tokenizers library reads ({error})") from error


def _vocabulary(path: Path) -> dict[str, int]:
    content = _read_json(path)
    model = content.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocabulary, list):  # unigram: [piece, score] in the order of ids
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        return {**vocabulary, **added}
    except (TypeError, KeyError, IndexError) as error:
        raise UserError(f"{path}: no vocabulary in it; not a tokenizer.json") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
