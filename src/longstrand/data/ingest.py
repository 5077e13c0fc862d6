"""From files to stores: FASTA letters, JSONL rows, and the tokens of letters under a text tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longstrand.data.chat import ChatTemplate
from longstrand.data.compressed import read_blocks
from longstrand.data.documents import Stretches
from longstrand.data.fasta import BOM, Header, read_fasta
from longstrand.data.jsonl import Chat, Row, Text, Tokens, kind_of_row, read_jsonl
from longstrand.data.letters import ACCEPTED, LetterPolicy, reverse_complement, show_letter
from longstrand.data.store import HAS_LOWER, HAS_N, NOT_SUPERVISED, Store, Writer, content_digest, open_store
from longstrand.data.text_lines import read_lines
from longstrand.data.tokens import TextTokenizer, spans_of
from longstrand.errors import UserError

Kind = Literal["fasta", "jsonl", "tokens"]
_NAMES_KEPT = 20
_BLOCK_LETTERS = 1 << 20


def kind_of_file(path: Path) -> Kind:
    """What the file holds, by its first byte that is no blank (the suffix says nothing).

    Raises:
        UserError: it is empty, or neither FASTA nor JSONL.
    """
    seen = b""
    for block in read_blocks(path):
        seen = (seen + block).removeprefix(BOM).lstrip()[:64]
        if seen:
            break
    if seen.startswith(b">"):
        return "fasta"
    if seen.startswith(b"{"):
        return kind_of_row(next(line for _, line in read_lines(path) if line.strip()))
    if not seen:
        raise UserError(f"{path}: the file is empty; give a FASTA or JSONL file")
    start = seen[:20].decode("ascii", "backslashreplace")
    raise UserError(f"{path}: starts with {start!r}: neither FASTA ('>name') nor JSONL ('{{'); convert it")


def open_fasta(path: Path, cache: Path) -> Store:
    """The letters of a FASTA file as they stand there; facts count letters, header-only and repeated names."""
    return open_store(cache, path, f"fasta {content_digest(path)}", np.uint8, lambda w: _write_fasta(path, w))


def open_jsonl(path: Path, cache: Path, tokenizer: TextTokenizer | None, only_tokens: bool) -> Store:
    """The rows of a JSONL file, one record each.

    Token rows are kept as they are. Text becomes uint32 tokens with a tokenizer; without one ("bases") it must
    consist of nucleotide letters and is kept as letters. A text that is supervised to its end is closed by the
    tokenizer's end token where its folder names one.

    Raises:
        UserError: a row that cannot be read or encoded, with its line.
    """
    holds_tokens = tokenizer is not None or only_tokens
    key = f"jsonl {content_digest(path)} {tokenizer.fingerprint if tokenizer else 'bases'} {only_tokens}"
    dtype = np.uint32 if holds_tokens else np.uint8
    return open_store(cache, path, key, dtype, lambda w: _write_jsonl(path, w, tokenizer, only_tokens))


def open_tokens(
    store: Store, stretches: Stretches, tokenizer: TextTokenizer, policy: LetterPolicy, cache: Path
) -> Store:
    """Tokens of stretches of a letter store, one record each, encoded from its own start.

    Letters are read upper-case and under the policy first; a token that spans an N or a lower-case letter is marked.
    """
    places = np.stack([stretches.start, stretches.end, stretches.turned.astype(np.int64)]).tobytes().hex()
    key = f"tokens {store.digest} {tokenizer.fingerprint} {policy.iupac} {places}"

    def build(writer: Writer) -> dict[str, Any]:
        facts = {"unknown_tokens": 0}
        for index in range(len(stretches)):
            start, end = int(stretches.start[index]), int(stretches.end[index])
            record = store.record_at(start)
            offset = int(store.starts[record])
            writer.begin(
                f"{store.names[record]}:{start - offset + 1}-{end - offset}", int(store.lines[record])
            )
            letters = store.values[start:end]
            for block in _blocks(letters, tokenizer.cut, bool(stretches.turned[index])):
                ids, marks = _encode_letters(block, tokenizer, policy, store.place(record))
                facts["unknown_tokens"] += tokenizer.num_unknown(ids)
                writer.add(ids, marks)
        return facts

    return open_store(cache, store.source, key, np.uint32, build)


def _write_fasta(path: Path, writer: Writer) -> dict[str, Any]:
    counts = np.zeros(256, np.int64)
    empty: list[str] = []
    names: dict[str, int] = {}
    last: Header | None = None
    letters_of_last = num_records = num_empty = 0
    for item in _with_end(read_fasta(path)):
        if isinstance(item, bytes):
            writer.add(item)
            counts += np.bincount(np.frombuffer(item, np.uint8), minlength=256)
            letters_of_last += len(item)
            continue
        if last is not None and letters_of_last == 0:
            num_empty += 1
            empty += [f"{last.name} (line {last.line})"] if len(empty) < _NAMES_KEPT else []
        if item is not None:
            num_records += 1
            names[item.name] = names.get(item.name, 0) + 1
            writer.begin(item.name, item.line)
        last, letters_of_last = item, 0
    if not counts.any():
        raise UserError(f"{path}: {num_records} header lines and no letter; the sequences are missing")
    repeated = {name: count for name, count in names.items() if count > 1 and name}
    return {
        "records": num_records,
        "letters": _named(counts),
        "header_only": {"records": num_empty, "names": empty},
        "repeated_names": {
            "names": len(repeated),
            "records": sum(repeated.values()),
            "first": dict(list(repeated.items())[:_NAMES_KEPT]),
        },
    }


def _with_end(items: Iterator[Header | bytes]) -> Iterator[Header | bytes | None]:
    yield from items
    yield None


def _write_jsonl(
    path: Path, writer: Writer, tokenizer: TextTokenizer | None, only_tokens: bool
) -> dict[str, Any]:
    rows = unknown = 0
    counts = np.zeros(256, np.int64)
    for line, row in read_jsonl(path, only_tokens):
        rows += 1
        where = f"{path}:{line}"
        writer.begin(f"line {line}", line)
        if isinstance(row, Tokens):
            if tokenizer is None and not only_tokens:
                raise UserError(
                    f'{where}: input_ids among text rows; keep token rows in a file of their own (format = "tokens")'
                )
            writer.add(row.ids, np.where(row.supervised, 0, NOT_SUPERVISED))
        elif tokenizer is None:
            counts += _write_letters(row, writer, where)
        else:
            ids, marks = _encode_row(row, tokenizer, where)
            unknown += tokenizer.num_unknown(ids)
            writer.add(ids, marks)
    return {"records": rows, "letters": _named(counts), "unknown_tokens": unknown}


def _write_letters(row: Row, writer: Writer, where: str) -> np.ndarray:
    """int64[256]: the letters written."""
    counts = np.zeros(256, np.int64)
    if not isinstance(row, Text):
        raise UserError(
            f'{where}: messages need a tokenizer with a chat template; tokenizer = "bases" has none'
        )
    for text, supervised in row.pieces:
        data = text.encode()
        if refused := data.translate(None, ACCEPTED):
            raise UserError(
                f'{where}: {show_letter(refused[0])} is not a nucleotide letter, and tokenizer = "bases" reads '
                "nothing else; name a text tokenizer in data.tokenizer"
            )
        if data:
            writer.add(data, np.full(len(data), 0 if supervised else NOT_SUPERVISED, np.uint8))
            counts += np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    return counts


def _named(counts: np.ndarray) -> dict[str, int]:
    return {chr(byte): int(counts[byte]) for byte in np.flatnonzero(counts)}


def _encode_row(row: Text | Chat, tokenizer: TextTokenizer, where: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids, marks): each piece is encoded alone, so a prompt has the tokens it would have without its answer."""
    pieces = (
        row.pieces if isinstance(row, Text) else _chat_template(tokenizer, where).pieces(row.messages, where)
    )
    ids = [tokenizer.encode(text, where).ids for text, _ in pieces]
    marks = [
        np.full(len(own), 0 if supervised else NOT_SUPERVISED, np.uint8)
        for own, (_, supervised) in zip(ids, pieces, strict=True)
    ]
    joined, joined_marks = np.concatenate(ids), np.concatenate(marks)
    ends_supervised = len(pieces) > 0 and pieces[-1][1]
    if tokenizer.eos is not None and ends_supervised and (not len(joined) or joined[-1] != tokenizer.eos):
        joined = np.append(joined, np.uint32(tokenizer.eos))
        joined_marks = np.append(joined_marks, np.uint8(0))
    if not len(joined):
        raise UserError(f"{where}: the tokenizer makes no token of this row; remove it")
    return joined, joined_marks


def _chat_template(tokenizer: TextTokenizer, where: str) -> ChatTemplate:
    if tokenizer.chat is None:
        raise UserError(
            f"{where}: messages need a chat template, and {tokenizer.path.parent} has none; give a tokenizer folder "
            "with one, or write prompt and completion"
        )
    return tokenizer.chat


def _blocks(letters: np.ndarray, cut: int | None, turned: bool) -> Iterator[np.ndarray]:
    """Letters along their strand in blocks of whole pieces, so that encoding them alone changes nothing."""
    size = len(letters) if cut is None else max(1, _BLOCK_LETTERS // cut) * cut
    for at in range(0, len(letters), max(size, 1)):
        if turned:
            yield reverse_complement(letters[max(len(letters) - at - size, 0) : len(letters) - at])
        else:
            yield letters[at : at + size]


def _encode_letters(
    letters: np.ndarray, tokenizer: TextTokenizer, policy: LetterPolicy, where: str
) -> tuple[np.ndarray, np.ndarray]:
    normal = policy.normal()[letters]
    encoded = tokenizer.encode(normal.tobytes().decode("ascii"), where)
    if encoded.uncovered > 0:
        raise UserError(
            f"{where}: the tokenizer {tokenizer.path} has no token for {encoded.uncovered:,} letters near here and "
            "would drop them; give one that knows A, C, G, T and N"
        )
    has_n = spans_of(encoded.widths, normal == ord("N"))
    has_lower = spans_of(encoded.widths, (letters >= ord("a")) & (letters <= ord("z")))
    return encoded.ids, has_n * HAS_N + has_lower * HAS_LOWER
