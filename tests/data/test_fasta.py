"""FASTA files of every shape, against a ten-line reader, and every kind of broken one."""

from __future__ import annotations

import gzip
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstrand.data import compressed
from longstrand.data.fasta import Header, read_fasta
from longstrand.data.ingest import kind_of_file
from longstrand.errors import UserError

BGZIP_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


def read_plainly(text: str) -> list[tuple[str, str]]:
    """The oracle: a FASTA reader in ten lines of plain Python."""
    records: list[tuple[str, str]] = []
    for line in text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if line.startswith(">"):
            records.append((line[1:].strip(), ""))
        elif line.strip():
            name, letters = records.pop()
            records.append((name, letters + "".join(line.split())))
    return records


def read(path: Path) -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []
    for item in read_fasta(path):
        if isinstance(item, Header):
            records.append((item.text, ""))
        else:
            records[-1] = (records[-1][0], records[-1][1] + item.decode())
    return records


def bgzip_block(data: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = packer.compress(data) + packer.flush()
    header = bytes.fromhex("1f8b08040000000000ff0600424302 00") + struct.pack("<H", len(body) + 25)
    return header + body + struct.pack("<II", zlib.crc32(data), len(data))


SHAPES = {
    "plain": ">a one\nACGT\nAC\n>b\nGGTT\n",
    "windows line ends": ">a one\r\nACGT\r\nAC\r\n>b\r\nGGTT\r\n",
    "old Mac line ends": ">a one\rACGT\rAC\r>b\rGGTT\r",
    "blank lines inside and between": ">a\nAC\n\nGT\n\n\n>b\n\nGG\n",
    "no final newline": ">a\nACGT\n>b\nGG",
    "header without letters in the middle": ">a\n>b\nACGT\n",
    "header without letters at the end": ">a\nACGT\n>b",
    "byte order mark": "\ufeff>a\nACGT\n",
    "blank line first": "\n\n>a\nACGT\n",
    "trailing blanks and blanks in a line": ">a \t\nACGT  \t\nAC GT \n",
    "mixed case": ">a\nACgtNnacGT\n",
    "IUPAC letters": ">a\nACGTURYSWKMBDHVNacgturyswkmbdhvn\n",
    "gaps and stops": ">a\nAC-GT.AC*GTX?x\n",
    "a greater-than inside a header": ">A <B> <C>\nACGTACGTAC\n",
    "one long line": ">a\n" + "ACGTTGCA" * 25_000 + "\n",
    "a name after a blank": "> a b\nACGT\n",
    "no name": ">\nACGT\n",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_records_names_and_letters_equal_the_plain_reader(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(SHAPES[shape].encode())
    assert read(path) == read_plainly(SHAPES[shape])


@settings(max_examples=150, deadline=None)
@given(
    records=st.lists(
        st.tuples(st.text("ab>c |", max_size=6), st.text("ACGTNacgtn", max_size=30)), min_size=1
    ),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    width=st.integers(1, 12),
    final=st.booleans(),
    block=st.integers(1, 9),
)
def test_any_file_in_any_block_size_reads_like_the_plain_reader(
    tmp_path_factory: pytest.TempPathFactory, records: list, end: str, width: int, final: bool, block: int
) -> None:
    lines = []
    for header, letters in records:
        lines += [">" + header, *(letters[i : i + width] for i in range(0, len(letters), width))]
    text = end.join(lines) + (end if final else "")
    path = tmp_path_factory.mktemp("fasta") / "x.fa"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed, "_READ_BYTES", block)
        assert read(path) == read_plainly(text)


def test_headers_carry_their_line(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b"\r\n>a\r\nAC\r\n\r\nGT\r\n>b\r\n>c\r\nA")
    assert [(h.name, h.line) for h in read_fasta(path) if isinstance(h, Header)] == [
        ("a", 2),
        ("b", 6),
        ("c", 7),
    ]


TEXT = b">a\nACGT\n>b\nGGGGTTTT\n"
GZIPPED = {
    "one member": gzip.compress(TEXT),
    "two members": gzip.compress(TEXT[:8]) + gzip.compress(TEXT[8:]),
    "bgzip": bgzip_block(TEXT[:5]) + bgzip_block(TEXT[5:]) + BGZIP_END,
    "bgzip with an empty block in the middle": bgzip_block(TEXT[:5])
    + BGZIP_END
    + bgzip_block(TEXT[5:])
    + BGZIP_END,
    "zero padding at the end": gzip.compress(TEXT) + bytes(512),
}


@pytest.mark.parametrize("kind", GZIPPED)
@pytest.mark.parametrize("suffix", [".fa.gz", ".fa"])
def test_all_gzip_members_are_read_whatever_the_suffix(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(GZIPPED[kind])
    oracle = subprocess.run(["gzip", "-dc"], input=GZIPPED[kind], capture_output=True).stdout.decode()
    assert read(path) == read_plainly(oracle) == [("a", "ACGT"), ("b", "GGGGTTTT")]


def test_plain_text_named_gz_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "x.fa.gz"
    path.write_bytes(TEXT)
    assert read(path) == read_plainly(TEXT.decode())


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


BAD = {
    "gzip cut by 10 bytes": (gzip.compress(TEXT)[:-10], "was cut"),
    "bgzip cut inside its last block": (GZIPPED["bgzip"][:-10], "was cut"),
    "bgzip cut between blocks": (GZIPPED["bgzip"][: -len(BGZIP_END)], "end-of-file block"),
    "gzip header alone": (gzip.compress(TEXT)[:5], "was cut"),
    "gzip with a flipped bit": (damaged(gzip.compress(TEXT * 50), 25), "corrupt"),
    "gzip with a wrong checksum": (damaged(gzip.compress(TEXT), -8), "corrupt"),
    "gzip followed by text": (gzip.compress(TEXT) + b">c\nAAAAAAAAAAAAAAAAAAA\n", "last gzip member"),
    "empty file": (b"", "no record"),
    "empty gzip": (gzip.compress(b""), "no record"),
    "blank lines only": (b"\n\r\n \n", "no record"),
    "no header": (b"ACGT\nACGT\n", ":1: text before"),
    "FASTQ": (b"@read\nACGT\n+\nIIII\n", "FASTQ"),
    "JSONL": (b'{"text": "ACGT"}\n', "JSONL"),
    "digits": (b">a\nAC\n  1 acgt\n", ":3: '1'"),
    "protein": (b">a\nACGT\n>p\nMKV\nLEQ\n", ":5: 'L'"),
    "a greater-than inside a line": (b">a\nACGT>b\n", ":2: '>'"),
    "NUL bytes": (b">a\nAC\0GT\n", "byte 0x00"),
    "zip": (b"PK\x03\x04....", "zip archive"),
    "xz": (b"\xfd7zXZ\0....", "is xz"),
    "UTF-16": (">a\nACGT\n".encode("utf-16"), "UTF-16"),
    "an endless header": (b">" + b"A" * (3 << 20), "1 MiB"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, kind: str) -> None:
    data, said = BAD[kind]
    path = tmp_path / "bad.fa.gz"
    path.write_bytes(data)
    with pytest.raises(UserError) as refusal:
        read(path)
    message = str(refusal.value)
    assert said in message and str(path) in message and "\n" not in message


def test_a_greater_than_inside_a_line_starts_no_record_at_a_blocks_border_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.fa"
    path.write_bytes(b">a\nACGT>b\n")
    monkeypatch.setattr(compressed, "_READ_BYTES", 7)
    with pytest.raises(UserError, match=":2: '>'"):
        read(path)


def test_an_absent_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no.fa", "No such file"), (tmp_path, "not a regular file")):
        with pytest.raises(UserError, match=said):
            read(path)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\xef\xbb\xbf\r\n >caf\xe9\nA", "fasta"),
        (gzip.compress(b'\n{"text": "x \\"input_ids\\""}'), "jsonl"),
        (b'{"messages": []}', "jsonl"),
        (b'{"loss_mask": [1], "input_ids": [5]}', "tokens"),
    ],
    ids=[
        "fasta",
        "gzip",
        "messages",
        "tokens",
    ],  # bytes of gzip hold the time: ids must agree between workers
)
def test_the_first_byte_says_what_a_file_holds(tmp_path: Path, data: bytes, kind: str) -> None:
    (tmp_path / "x").write_bytes(data)
    assert kind_of_file(tmp_path / "x") == kind


def test_a_file_that_begins_with_many_blank_lines_is_still_fasta(tmp_path: Path) -> None:
    (tmp_path / "x.fa").write_text("\n" * 100 + ">a\nACGT\n")
    assert kind_of_file(tmp_path / "x.fa") == "fasta"
