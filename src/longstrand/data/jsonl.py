"""JSONL rows: text, prompt and completion, messages, or tokens; each checked, each problem with its line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longstrand.data.text_lines import read_lines
from longstrand.errors import UserError

MAX_TOKEN = 2**32 - 1
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Text:
    """Text to continue: the loss is on all of it, or (a prompt) on none of it."""

    pieces: tuple[tuple[str, bool], ...]  # (text, supervised)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; the loss is on the assistant's turns."""

    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids as given, with 1 where a token is a target."""

    ids: np.ndarray  # uint32
    supervised: np.ndarray  # bool


Row = Text | Chat | Tokens


def read_jsonl(path: Path, only_tokens: bool = False) -> Iterator[tuple[int, Row]]:
    """(line, row) of each line that is not blank.

    A row holds exactly one of `text`; `prompt` and `completion`; `messages`; `input_ids` (with `loss_mask` or
    without). Other keys are a row's own business (ids, sources) and are not read.

    Raises:
        UserError: the first row that is no such object, with file, line, key and rule; a file without rows.
    """
    found = False
    for number, line in read_lines(path):
        if line.strip():
            found = True
            yield number, _read_row(line, f"{path}:{number}", only_tokens)
    if not found:
        raise UserError(f"{path}: no row; a JSONL file needs at least one line with a JSON object")


def kind_of_row(line: str) -> Literal["jsonl", "tokens"]:
    """What the first row of a file says about it."""
    return "tokens" if '"input_ids"' in line and '"text"' not in line else "jsonl"


def _read_row(line: str, where: str, only_tokens: bool) -> Row:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{where}: key {twice!r} stands twice; keep one")
        return dict(items)

    try:
        row = json.loads(line, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply; a row is a flat JSON object") from error
    except ValueError as error:  # a number of more than 4,300 digits
        raise UserError(f"{where}: cannot be read ({error})") from error
    if not isinstance(row, dict):
        raise UserError(
            f'{where}: the line is a JSON {_kind(row)}; a row is an object such as {{"text": ...}}'
        )
    readers: dict[str, Callable[[dict[str, Any], str], Row]] = {
        "text": _text,
        "prompt": _prompt,
        "messages": _messages,
        "input_ids": _tokens,
    }
    chosen = [key for key in readers if key in row]
    if "completion" in row and "prompt" not in row:
        raise UserError(f"{where}: completion without prompt; give both")
    if "loss_mask" in row and chosen != ["input_ids"]:
        raise UserError(f"{where}: loss_mask goes with input_ids only; remove it or give input_ids")
    if len(chosen) != 1:
        has = " and ".join(chosen) if chosen else f"only {', '.join(map(repr, list(row)[:5])) or 'no key'}"
        raise UserError(f"{where}: the row has {has}; it needs one of text, prompt, messages, input_ids")
    if only_tokens and chosen != ["input_ids"]:
        raise UserError(f'{where}: the row has {chosen[0]}, but format = "tokens" reads input_ids only')
    return readers[chosen[0]](row, where)


def _text(row: dict[str, Any], where: str) -> Text:
    return Text(((_string(row, "text", where), True),))


def _prompt(row: dict[str, Any], where: str) -> Text:
    if "completion" not in row:
        raise UserError(f"{where}: prompt without completion; give both")
    prompt = _string(row, "prompt", where, may_be_empty=True)
    return Text(((prompt, False), (_string(row, "completion", where), True)))


def _messages(row: dict[str, Any], where: str) -> Chat:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages is {_kind(messages)}; it must be a list of turns, not empty")
    for number, message in enumerate(messages):
        place = f"{where}: messages[{number}]"
        if not isinstance(message, dict):
            raise UserError(f"{place} is {_kind(message)}; a turn is an object with role and content")
        if message.get("role") not in ROLES:
            raise UserError(f"{place}: role is {message.get('role')!r}; it must be one of {', '.join(ROLES)}")
        _string(message, "content", place, may_be_empty=True)
        if extra := sorted(set(message) - {"role", "content"}):
            raise UserError(f"{place}: {extra[0]!r} is not read; a turn has role and content only")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise UserError(
            f"{where}: no assistant turn with content, so nothing to learn; add one or remove the row"
        )
    return Chat(tuple(messages))


def _tokens(row: dict[str, Any], where: str) -> Tokens:
    ids = row["input_ids"]
    if not isinstance(ids, list) or not ids:
        raise UserError(f"{where}: input_ids is {_kind(ids)}; it must be a list of token ids, not empty")
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in ids):
        at = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token <= MAX_TOKEN)
        raise UserError(f"{where}: input_ids[{at}] is {ids[at]!r}; a token id is a whole number from 0")
    mask = row.get("loss_mask", [1] * len(ids))
    if not isinstance(mask, list) or len(mask) != len(ids):
        has = f"{len(mask)} entries" if isinstance(mask, list) else _kind(mask)
        raise UserError(f"{where}: loss_mask has {has}; it needs one for each of the {len(ids)} input_ids")
    if not all(entry in (0, 1) and isinstance(entry, int) for entry in mask):
        at = next(i for i, entry in enumerate(mask) if entry not in (0, 1) or not isinstance(entry, int))
        raise UserError(f"{where}: loss_mask[{at}] is {mask[at]!r}; it must be 0 or 1")
    return Tokens(np.array(ids, np.uint32), np.array(mask, bool))


def _string(row: dict[str, Any], key: str, where: str, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise UserError(
            f"{where}: {key} is {_kind(value)}; it must be text{'' if may_be_empty else ', not empty'}"
        )
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(
            f"{where}: {key} holds half of a surrogate pair (\\ud800-\\udfff); write the character whole"
        )
    return value


def _kind(value: object) -> str:
    if value == "" or value == [] or value is None:
        return {"": "empty text", "[]": "an empty list"}.get(str(value), "null or absent")
    names = {bool: "true/false", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)
