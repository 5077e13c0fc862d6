"""JSONL rows: what they become, and every kind of bad one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from longstrand.data.jsonl import Chat, Text, Tokens, read_jsonl
from longstrand.errors import UserError


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_each_kind_of_row_says_what_is_supervised(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = write(
        tmp_path / "x.jsonl",
        {"text": "abc", "id": 7},
        "",
        {"prompt": "p", "completion": "c"},
        {"messages": turns},
        {"input_ids": [5, 70_000, 4_294_967_295], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6]},
        {"prompt": "", "completion": "ü"},
    )
    (l1, text), (l2, prompt), (l3, chat), (l4, masked), (l5, tokens), (l6, last) = read_jsonl(path)
    assert [l1, l2, l3, l4, l5, l6] == [1, 3, 4, 5, 6, 7]
    assert text == Text((("abc", True),))
    assert prompt == Text((("p", False), ("c", True)))
    assert chat == Chat(tuple(turns))
    assert isinstance(masked, Tokens) and masked.ids.dtype == np.uint32
    assert masked.ids.tolist() == [5, 70_000, 4_294_967_295] and masked.supervised.tolist() == [
        False,
        True,
        True,
    ]
    assert isinstance(tokens, Tokens) and tokens.supervised.all()
    assert last == Text((("", False), ("ü", True)))


@pytest.mark.parametrize(
    "dress", [lambda data: b"\xef\xbb\xbf" + data, gzip.compress, lambda d: d.replace(b"\n", b"\r\n")]
)
def test_mark_gzip_and_windows_line_ends_change_nothing(
    tmp_path: Path, dress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(dress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert [row for _, row in read_jsonl(path)] == [Text((("a", True),)), Text((("b", True),))]


TURN = {"role": "assistant", "content": "ho"}
BAD = {
    "not JSON": ('{"text": "a"', "not JSON"),
    "two objects on a line": ('{"text": "a"} {"text": "b"}', "not JSON"),
    "a list": ("[1, 2]", "JSON list"),
    "a bare text": ('"ACGT"', "JSON text"),
    "no known key": ({"sequence": "ACGT"}, "only 'sequence'"),
    "no key": ({}, "no key"),
    "two kinds": ({"text": "a", "input_ids": [1]}, "text and input_ids"),
    "a key twice": ('{"text": "a", "text": "b"}', "'text' stands twice"),
    "text that is a number": ({"text": 5}, "text is number"),
    "empty text": ({"text": ""}, "text is empty text"),
    "null text": ({"text": None}, "text is null"),
    "half a surrogate pair": ('{"text": "\\ud800"}', "surrogate"),
    "a prompt alone": ({"prompt": "p"}, "prompt without completion"),
    "a completion alone": ({"completion": "c"}, "completion without prompt"),
    "an empty completion": ({"prompt": "p", "completion": ""}, "completion is empty"),
    "messages that are text": ({"messages": "hi"}, "messages is text"),
    "no messages": ({"messages": []}, "messages is an empty list"),
    "a turn that is text": ({"messages": ["hi"]}, "messages[0] is text"),
    "an unknown role": ({"messages": [{"role": "human", "content": "x"}]}, "role is 'human'"),
    "a turn without content": ({"messages": [{"role": "user"}]}, "messages[0]: content"),
    "a turn with more": ({"messages": [{**TURN, "tool_calls": []}]}, "'tool_calls' is not read"),
    "no assistant": ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant turn"),
    "no token": ({"input_ids": []}, "input_ids is an empty list"),
    "a fraction as a token": ({"input_ids": [1, 2.5]}, "input_ids[1] is 2.5"),
    "true as a token": ({"input_ids": [True]}, "input_ids[0] is True"),
    "a negative token": ({"input_ids": [3, -1]}, "input_ids[1] is -1"),
    "a token of 33 bits": ({"input_ids": [2**32]}, "input_ids[0] is 4294967296"),
    "a mask of another length": ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries"),
    "a mask of fractions": ({"input_ids": [1, 2], "loss_mask": [1, 0.5]}, "loss_mask[1] is 0.5"),
    "a mask beside text": ({"text": "a", "loss_mask": [1]}, "loss_mask goes with input_ids"),
    "an endless number": ('{"text": "a", "n": ' + "1" * 5000 + "}", "cannot be read"),
    "nested for ever": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_one_line_with_its_place(tmp_path: Path, kind: str) -> None:
    row, said = BAD[kind]
    path = write(tmp_path / "bad.jsonl", {"text": "fine"}, "", row)
    with pytest.raises(UserError) as refusal:
        list(read_jsonl(path))
    message = str(refusal.value)
    assert said in message and f"{path}:3" in message and "\n" not in message


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(UserError, match="no row"):
        list(read_jsonl(path))


def test_bytes_that_are_no_text_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"x\.jsonl:2: not UTF-8"):
        list(read_jsonl(path))
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 50)[:-6])
    with pytest.raises(UserError, match="was cut"):
        list(read_jsonl(path))


def test_a_file_of_tokens_refuses_text(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"input_ids": [1]}, {"text": "a"})
    with pytest.raises(UserError, match=r':2: the row has text, but format = "tokens"'):
        list(read_jsonl(path, only_tokens=True))
