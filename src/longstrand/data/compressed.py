"""Bytes of a file, plain or gzip (also bgzip and concatenated members), in blocks of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from longstrand.errors import UserError

_READ_BYTES = 1 << 17  # deflate expands at most 1032-fold: 135 MB per block in the worst case
_GZIP = b"\x1f\x8b"
_BGZIP_HEADER_BYTES = 18
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"CRAM": "a CRAM file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yields the file's decompressed bytes; gzip is recognised by its first two bytes, not by its name.

    Raises:
        UserError: the file cannot be read, is cut, corrupt, or compressed in another way.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a regular file; give a file")
        with open(path, "rb") as file:
            head = file.read(8)
            file.seek(0)
            if head.startswith(_GZIP):
                yield from _inflate(file, path)
                return
            for magic, kind in _OTHER_FORMATS.items():
                if head.startswith(magic):
                    raise UserError(
                        f"{path}: is {kind}; only plain text, gzip and bgzip are read: convert it"
                    )
            while block := file.read(_READ_BYTES):
                yield block
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _inflate(file: BinaryIO, path: Path) -> Iterator[bytes]:
    data = file.read(_READ_BYTES)
    open_bgzip = False  # a bgzip stream ends with an empty member; without it whole blocks are missing
    while data:
        if not (data := data.lstrip(b"\0")):  # zero padding after a member, as gzip itself allows
            data = file.read(_READ_BYTES)
            continue
        if len(data) < _BGZIP_HEADER_BYTES:
            data += file.read(_READ_BYTES)
        if not data.startswith(_GZIP):
            raise UserError(
                f"{path}: other bytes follow the last gzip member; the file is damaged: copy it again"
            )
        is_bgzip = len(data) >= _BGZIP_HEADER_BYTES and bool(data[3] & 4) and data[12:14] == b"BC"
        inflater, num_bytes = zlib.decompressobj(31), 0
        while not inflater.eof:
            if not data and not (data := file.read(_READ_BYTES)):
                raise UserError(f"{path}: the gzip data stops in the middle; the file was cut: copy it again")
            try:
                block = inflater.decompress(data)
            except zlib.error as error:
                raise UserError(f"{path}: the gzip data is corrupt ({error}); copy it again") from error
            data = b""
            num_bytes += len(block)
            if block:
                yield block
        open_bgzip = is_bgzip and num_bytes > 0
        data = inflater.unused_data or file.read(_READ_BYTES)
    if open_bgzip:
        raise UserError(f"{path}: the bgzip end-of-file block is missing; the file was cut: copy it again")
