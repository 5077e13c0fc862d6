"""Lines of a text file, plain or gzip, with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from longstrand.data.compressed import read_blocks
from longstrand.errors import UserError


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its line end) of each line; LF and CRLF end lines, a byte order mark is skipped.

    Raises:
        UserError: the file cannot be read, or a line is not UTF-8.
    """
    held: list[bytes] = []
    number = 1
    for block in read_blocks(path):
        *lines, rest = block.split(b"\n")
        for line in lines:
            yield number, _decode(b"".join([*held, line]), path, number)
            held = []
            number += 1
        held.append(rest)
    if any(held):
        yield number, _decode(b"".join(held), path, number)


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8 text (byte {error.start + 1} of the line)") from error
