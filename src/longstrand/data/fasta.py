"""FASTA text as a stream of headers and letters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longstrand.data.compressed import read_blocks
from longstrand.data.letters import ACCEPTED, show_letter
from longstrand.errors import UserError

_BLANKS = b" \t\v\f\n"
_HEADER_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Header:
    """A record's header line: its first word, the whole line without '>', and where it stands (from 1)."""

    name: str
    text: str
    line: int


def read_fasta(path: Path) -> Iterator[Header | bytes]:
    """Yields each record's header, then its letters in pieces, in bounded memory.

    Lines may end in LF, CRLF or CR; blank lines and blanks are layout and belong to no record; letters keep their
    case. A '>' starts a record only at the start of a line.

    Raises:
        UserError: the file is empty, is not FASTA, or holds a character that no policy reads (with its line).
    """
    parser = _Parser(path)
    for block in _unix_lines(read_blocks(path)):
        yield from parser.feed(block)
    yield from parser.finish()


def _unix_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """LF line ends throughout; a CR at a block's end waits for the block that may start with its LF."""
    held, first = b"", True
    for block in blocks:
        block = held + block
        if first:
            if len(block) < len(BOM):
                held = block
                continue
            block, first = block.removeprefix(BOM), False
        held = b"\r" if block.endswith(b"\r") else b""
        block = block.removesuffix(b"\r")
        yield block.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in block else block
    yield held.removeprefix(BOM).replace(b"\r", b"\n")


class _Parser:
    """Where the reader stands: the line, whether a record is open, and a header that still lacks its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 1
        self.at_line_start = True
        self.in_record = False
        self.header = b""

    def feed(self, block: bytes) -> Iterator[Header | bytes]:
        text, self.header = self.header + block, b""
        at = 0
        while at < len(text):
            if self.at_line_start and text[at] == ord(">"):
                end = text.find(b"\n", at)
                if end < 0:
                    self.header = text[at:]
                    if len(self.header) > _HEADER_BYTES:
                        raise UserError(
                            f"{self.path}:{self.line}: a header line of more than 1 MiB; not FASTA"
                        )
                    return
                yield self._open(text[at + 1 : end])
                self.line += 1
                at = end + 1
            else:
                next_header = text.find(b"\n>", at)
                end = len(text) if next_header < 0 else next_header + 1
                piece = text[at:end]
                letters = piece.translate(None, _BLANKS)
                if letters:
                    self._check(piece, letters)
                    yield letters
                self.line += piece.count(b"\n")
                self.at_line_start = piece.endswith(b"\n")
                at = end

    def finish(self) -> Iterator[Header]:
        if self.header:
            yield self._open(self.header[1:])
        if not self.in_record:
            raise UserError(
                f"{self.path}: no record; a FASTA file needs at least one line that starts with '>'"
            )

    def _open(self, line: bytes) -> Header:
        self.in_record = True
        text = line.decode("utf-8", "backslashreplace").strip()
        return Header(name=text.split(maxsplit=1)[0] if text else "", text=text, line=self.line)

    def _check(self, piece: bytes, letters: bytes) -> None:
        refused = letters.translate(None, ACCEPTED)
        if not self.in_record:
            hint = {ord("@"): "; it looks like FASTQ", ord("{"): "; it looks like JSONL"}.get(letters[0], "")
            line = self.line + piece[: piece.index(letters[0])].count(b"\n")
            raise UserError(
                f"{self.path}:{line}: text before the first '>' ({show_letter(letters[0])}){hint}; "
                "a FASTA record starts with a line '>name'"
            )
        if refused:
            line = self.line + piece[: piece.index(refused[0])].count(b"\n")
            raise UserError(
                f"{self.path}:{line}: {show_letter(refused[0])} is not a nucleotide letter; "
                "IUPAC letters and the signs - . * ? X are read: correct the file"
            )
