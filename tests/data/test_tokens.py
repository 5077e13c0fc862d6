"""Token ids: single letters, the cut rule against the plain tokenizer, chats, and what is supervised."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from longstrand.data.documents import Stretches
from longstrand.data.ingest import open_fasta, open_jsonl, open_tokens
from longstrand.data.letters import ALPHABET, LetterPolicy
from longstrand.data.store import HAS_LOWER, HAS_N, NOT_SUPERVISED
from longstrand.data.tokens import TextTokenizer, letter_ids
from longstrand.errors import UserError


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_plainly(plain: Tokenizer, text: str) -> list[int]:
    return plain.encode(text, add_special_tokens=False).ids


def test_a_letter_of_our_own_models_is_its_ascii_code() -> None:
    ids = letter_ids()
    assert {chr(at): int(ids[at]) for at in np.flatnonzero(ids >= 0)} == {chr(a): a for a in ALPHABET}


def test_a_letter_of_a_released_model_is_its_own_token(
    folder: Path, plain: Tokenizer, tmp_path: Path
) -> None:
    assert {chr(a): letter_ids(folder)[a] for a in ALPHABET} == {
        chr(a): plain.token_to_id(chr(a)) for a in ALPHABET
    }
    assert letter_ids(tmp_path).tolist() == letter_ids().tolist()
    unigram = {"model": {"vocab": [["<unk>", 0.0], ["A", -1], ["C", -1], ["T", -1], ["▁A", -1]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    with pytest.raises(UserError, match="no token for the letter G"):
        letter_ids(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"model": {"vocab": 3}}', "no vocabulary"),
        ('{"model": {"vocab": [1, 2]}}', "no vocabulary"),
        ('{"model": {"vocab": {}}, "added_tokens": [1]}', "no vocabulary"),
        ('{"model": {"vocab": {}}, "added_tokens": 5}', "no vocabulary"),
        ('{"model": {"vocab": {"A": 1.5, "C": 1, "G": 2, "T": 3}}}', "no token for the letter A"),
        (
            '{"model": {"vocab": {"A": 99999999999999999999, "C": 1, "G": 2, "T": 3}}}',
            "no token for the letter A",
        ),
        ('{"model": {"vocab": {"A": 1, "C": 1, "G": 2, "T": 3}}}', "A, C, G and T do not have a token each"),
    ],
)
def test_a_vocabulary_that_cannot_tell_the_letters_apart_is_refused(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=said):
        letter_ids(tmp_path)


def test_without_a_cut_rule_ids_are_the_plain_tokenizers(folder: Path, plain: Tokenizer) -> None:
    text = "".join(random.Random(1).choices("ACGT", k=10_000))
    assert TextTokenizer(str(folder), None).encode(text, "x").ids.tolist() == encode_plainly(plain, text)
    alone = TextTokenizer(str(folder / "tokenizer.json"), None)
    assert alone.encode(text, "x").ids.tolist() == encode_plainly(plain, text) and alone.eos is None


def cut_plainly(text: str, cut: int) -> list[str]:
    """The oracle: letter by letter, a border after each `cut` letters of a run that goes on."""
    pieces, run = [""], 0
    for letter in text:
        run = 0 if letter.isspace() else run + 1
        if run > 1 and (run - 1) % cut == 0:
            pieces.append("")
        pieces[-1] += letter
    return pieces


@settings(max_examples=200, deadline=None)
@given(text=st.text("AC \n", max_size=60), cut=st.integers(1, 9))
def test_the_cut_rule_cuts_runs_only(text: str, cut: int) -> None:
    tokenizer = TextTokenizer.__new__(TextTokenizer)
    tokenizer.cut = cut
    assert tokenizer.cut_text(text, "x") == cut_plainly(text, cut)


@pytest.mark.parametrize(
    "text", ["ACGT" * 250 + "acgt" * 9, "N" * 500, "words and " + "ACGTTGA" * 60 + " words"]
)
def test_under_the_cut_rule_ids_are_those_of_the_pieces(folder: Path, plain: Tokenizer, text: str) -> None:
    expected = [token for piece in cut_plainly(text, 64) for token in encode_plainly(plain, piece)]
    encoded = TextTokenizer(str(folder), 64).encode(text, "x")
    assert encoded.ids.tolist() == expected and encoded.widths.sum() == len(text) and encoded.uncovered == 0


def test_an_uncut_run_of_a_million_letters_is_refused_with_the_remedy(folder: Path) -> None:
    with pytest.raises(UserError, match=r"x:1: a run of more than 100,000 characters \(from character 3\)"):
        TextTokenizer(str(folder), None).encode("a " + "ACGT" * 250_000, "x:1")


def test_the_work_of_cutting_is_linear(folder: Path) -> None:
    tokenizer = TextTokenizer(str(folder), 50)
    for letters in (10_000, 20_000, 1_000_000):
        pieces = tokenizer.cut_text("A" * letters, "x")
        assert len(pieces) == letters // 50 and max(map(len, pieces)) == 50


def test_tokens_of_a_fasta_are_those_of_its_stretches_and_know_their_letters(
    folder: Path, plain: Tokenizer, tmp_path: Path
) -> None:
    drawn = random.Random(3)
    text = "".join(drawn.choices("ACGTNacgtR", [9, 9, 9, 9, 1, 1, 1, 1, 1, 1], k=400))
    (tmp_path / "x.fa").write_text(f">a\n{text}\n")
    letters = open_fasta(tmp_path / "x.fa", tmp_path / "cache")
    tokenizer = TextTokenizer(str(folder), 10)
    stretches = Stretches(
        np.zeros(2, np.int64), np.array([3, 200]), np.array([118, 400]), np.array([False, False])
    )
    store = open_tokens(letters, stretches, tokenizer, LetterPolicy(), tmp_path / "cache")
    for record, (start, end) in enumerate([(3, 118), (200, 400)]):
        ids, marks = [], []
        for at in range(start, end, 10):
            piece = text[at : min(at + 10, end)]
            found = plain.encode(piece.upper().replace("R", "N"), add_special_tokens=False)
            ids += found.ids
            for a, b in found.offsets:
                has_n = any(letter in "NR" for letter in piece[a:b])
                has_lower = any(letter.islower() for letter in piece[a:b])
                marks.append(has_n * HAS_N + has_lower * HAS_LOWER)
        own = slice(store.starts[record], store.starts[record + 1])
        assert store.values[own].tolist() == ids
        assert store.marks is not None and store.marks[own].tolist() == marks
    assert store.names == ["a:4-118", "a:201-400"]


def test_a_tokenizer_that_would_drop_letters_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.BPE(vocab={"A": 0, "C": 1, "G": 2, "T": 3}, merges=[])).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "x.fa").write_text(">a\nACGTNNAC\n")
    store = open_fasta(tmp_path / "x.fa", tmp_path / "cache")
    stretches = Stretches(np.zeros(1, np.int64), np.array([0]), np.array([8]), np.array([False]))
    with pytest.raises(UserError, match="no token for 2 letters"):
        open_tokens(store, stretches, TextTokenizer(str(tmp_path), None), LetterPolicy(), tmp_path / "cache")


def rows_of(path: Path, tokenizer: TextTokenizer, *rows: dict) -> list[tuple[list[int], list[int]]]:
    """(ids, supervised) of each row."""
    (path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = open_jsonl(path / "x.jsonl", path / "cache", tokenizer, only_tokens=False)
    marks = np.zeros(len(store.values), np.uint8) if store.marks is None else store.marks
    return [
        (store.values[a:b].tolist(), (marks[a:b] == 0).astype(int).tolist())
        for a, b in zip(store.starts, store.starts[1:], strict=False)
    ]


def test_text_and_completions_end_in_one_supervised_end_token_even_where_it_pads(
    folder: Path, plain: Tokenizer, tmp_path: Path
) -> None:
    def ids(text: str) -> list[int]:
        return encode_plainly(plain, text)

    text, answer, closed = rows_of(
        tmp_path,
        TextTokenizer(str(folder), None),
        {"text": "ACGT ACGT"},
        {"prompt": "what follows ACG", "completion": "T"},
        {"text": "A<eos>"},
    )
    assert text == ([*ids("ACGT ACGT"), 0], [1] * (len(ids("ACGT ACGT")) + 1))
    assert answer == ([*ids("what follows ACG"), *ids("T"), 0], [0] * len(ids("what follows ACG")) + [1] * 2)
    assert closed == ([*ids("A"), 0], [1, 1])


def test_only_the_assistants_turns_are_supervised(folder: Path, plain: Tokenizer, tmp_path: Path) -> None:
    turns = [("system", "S"), ("user", "AC"), ("assistant", "GT"), ("user", "A"), ("assistant", "C")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ((ids, supervised),) = rows_of(tmp_path, TextTokenizer(str(folder), None), {"messages": messages})
    expected_ids, expected = [], []
    for role, content in turns:
        tag, own = encode_plainly(plain, f"<|{role}|>"), encode_plainly(plain, content)
        expected_ids += tag + own
        expected += [0] * len(tag) + [int(role == "assistant")] * len(own)
    assert (ids, supervised) == ([*expected_ids, 0], [*expected, 1])


def test_a_tokenizer_file_alone_brings_neither_an_end_token_nor_a_template(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    alone = TextTokenizer(str(tmp_path / "tokenizer.json"), None)
    assert (alone.eos, alone.chat) == (None, None) and TextTokenizer(str(tmp_path), None).chat is not None


def test_a_template_that_fails_on_a_row_names_the_row(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content + 1 }}")
    row = {"messages": [{"role": "assistant", "content": "C"}]}
    with pytest.raises(UserError, match=r"x\.jsonl:1: the chat template refuses the messages"):
        rows_of(tmp_path, TextTokenizer(str(tmp_path), None), row)


def test_a_template_that_rewrites_earlier_turns_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    (other / "chat_template.jinja").write_text("{{ messages | length }} turns" + template)
    row = {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "C"}]}
    with pytest.raises(UserError, match=r"x\.jsonl:1: the chat template writes turn 1 differently"):
        rows_of(tmp_path, TextTokenizer(str(other), None), row)


BAD_FOLDERS = {
    "no tokenizer": ({}, "cannot be read"),
    "a tokenizer that is none": ({"tokenizer.json": "{}"}, "not a tokenizer"),
    "an end token it does not have": (
        {"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": "<end>"}'},
        "eos_token '<end>'",
    ),
    "a config that is no JSON": (
        {"tokenizer.json": None, "tokenizer_config.json": "{"},
        "cannot be read as JSON",
    ),
    "a template that is no Jinja": (
        {"tokenizer.json": None, "chat_template.jinja": "{% for %}"},
        "not valid Jinja",
    ),
}


def test_a_template_that_is_no_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not valid Jinja"):
        TextTokenizer(str(tmp_path), None)


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_bad_tokenizer_folder_is_named(folder: Path, tmp_path: Path, kind: str) -> None:
    files, said = BAD_FOLDERS[kind]
    for name, text in files.items():
        (tmp_path / name).write_text((folder / name).read_text() if text is None else text)
    with pytest.raises(UserError, match=said) as refusal:
        TextTokenizer(str(tmp_path), None)
    assert str(tmp_path) in str(refusal.value)


def test_messages_without_a_template_and_odd_letters_are_refused(folder: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "assistant", "content": "C"}]}
    with pytest.raises(UserError, match=r":1: messages need a chat template"):
        rows_of(tmp_path, TextTokenizer(str(folder / "tokenizer.json"), None), row)
    (tmp_path / "y.jsonl").write_text('{"text": "ACGT"}\n{"text": "AC GT"}\n')
    with pytest.raises(UserError, match=r"y\.jsonl:2: byte 0x20 is not a nucleotide letter"):
        open_jsonl(tmp_path / "y.jsonl", tmp_path / "cache", None, only_tokens=False)


def test_prompts_of_letters_are_not_supervised(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "ACgt"}\n{"prompt": "AN", "completion": "GT"}\n')
    store = open_jsonl(tmp_path / "x.jsonl", tmp_path / "cache", None, only_tokens=False)
    assert store.values.tobytes() == b"ACgtANGT" and store.starts.tolist() == [0, 4, 8]
    assert store.marks is not None
    assert store.marks.tolist() == [0] * 4 + [NOT_SUPERVISED] * 2 + [0] * 2
