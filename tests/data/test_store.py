"""The cache: right on the first and the second opening, after damage, and with two processes at once."""

from __future__ import annotations

import multiprocessing
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from longstrand.data import ingest, store
from longstrand.data.ingest import open_fasta
from longstrand.data.store import NOT_SUPERVISED, Store, Writer, open_store
from longstrand.errors import UserError

TEXT = ">a first\nACGTNN\nac\n>empty\n>b\nRYK\n>a again\nTTTT\n"


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "x.fa"
    path.write_text(TEXT)
    return path


def records(found: Store) -> list[tuple[str, int, str]]:
    stretches = [
        found.values[a:b].tobytes().decode() for a, b in zip(found.starts, found.starts[1:], strict=False)
    ]
    return list(zip(found.names, found.lines.tolist(), stretches, strict=True))


EXPECTED = [("a", 1, "ACGTNNac"), ("b", 5, "RYK"), ("a", 7, "TTTT")]


def test_records_of_one_name_stay_apart_and_header_only_ones_are_counted(fasta: Path, tmp_path: Path) -> None:
    found = open_fasta(fasta, tmp_path / "cache")
    assert records(found) == EXPECTED
    assert found.facts["records"] == 4
    assert found.facts["header_only"] == {"records": 1, "names": ["empty (line 4)"]}
    assert found.facts["repeated_names"] == {"names": 1, "records": 2, "first": {"a": 2}}
    assert found.facts["letters"] == {letter: (TEXT.split("\n", 1)[1] + "").count(letter) for letter in "NRYK"} | {
        "A": 1, "C": 1, "G": 1, "T": 5, "a": 1, "c": 1
    }  # fmt: skip


def test_a_second_opening_reads_the_cache_and_another_content_does_not(
    fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_fasta(fasta, tmp_path / "cache")
    before = fasta.stat()
    with monkeypatch.context() as patch:
        patch.setattr(ingest, "_write_fasta", lambda *_: pytest.fail("built twice"))
        assert records(open_fasta(fasta, tmp_path / "cache")) == EXPECTED
        moved = fasta.rename(tmp_path / "moved.fa")
        assert records(open_fasta(moved, tmp_path / "cache")) == EXPECTED
    fasta.write_text(TEXT.replace("TTTT", "TTTA"))
    os.utime(fasta, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = open_fasta(fasta, tmp_path / "cache")
    assert changed.digest != first.digest and records(changed)[2] == ("a", 7, "TTTA")


def test_a_cache_can_be_read_by_other_users(fasta: Path, tmp_path: Path) -> None:
    found = open_fasta(fasta, tmp_path / "cache")
    assert (tmp_path / "cache" / found.digest).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["values", "index.npz", "store.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
def test_a_damaged_cache_is_built_again(fasta: Path, tmp_path: Path, name: str, damage: str) -> None:
    digest = open_fasta(fasta, tmp_path / "cache").digest
    path = tmp_path / "cache" / digest / name
    data = path.read_bytes()
    if damage == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else b"")
    assert records(open_fasta(fasta, tmp_path / "cache")) == EXPECTED
    assert path.read_bytes() == data
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.fa"
    path.write_text(">a\nACGT\n>b\nAC9T\n")
    with pytest.raises(UserError, match=r"bad\.fa:4: '9'"):
        open_fasta(path, tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_old_remains_of_killed_builds_are_removed_and_young_ones_are_not(fasta: Path, tmp_path: Path) -> None:
    for name, age in ((".old.part", 90_000), (".young.part", 10)):
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True)
        os.utime(folder, (folder.stat().st_mtime - age,) * 2)
    open_fasta(fasta, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").glob(".*.part")) == [".young.part"]


def _open_and_report(path: Path, cache: Path, start: object, answers: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    answers.put(records(open_fasta(path, cache)))  # type: ignore[attr-defined]


def test_processes_that_open_at_once_all_get_the_records(fasta: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(3), context.Queue()
    arguments = (fasta, tmp_path / "cache", start, answers)
    workers = [context.Process(target=_open_and_report, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == [EXPECTED] * 3
    for worker in workers:
        worker.join()
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1


def _open_with_little_room(path: Path, cache: Path, answers: object) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        open_fasta(path, cache)
    except UserError as error:
        answers.put(str(error))  # type: ignore[attr-defined]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    path.write_text(">a\n" + "ACGT" * 5000)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    worker = context.Process(target=_open_with_little_room, args=(path, tmp_path / "cache", answers))
    worker.start()
    message = answers.get(timeout=60)
    worker.join()
    assert "cache" in message and "File too large" in message and "data.cache" in message
    assert records(open_fasta(path, tmp_path / "cache"))[0][2] == "ACGT" * 5000


def test_a_cache_that_cannot_be_a_folder_is_one_line(fasta: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache"):
        open_fasta(fasta, tmp_path / "file" / "cache")


def test_marks_appear_for_all_values_once_one_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCK", 3)

    def build(writer: Writer) -> dict:
        writer.begin("a", 1)
        writer.add(np.arange(7))
        writer.begin("b", 2)
        writer.add(np.array([70_000, 9]), np.array([0, NOT_SUPERVISED]))
        writer.add(np.array([5]))
        return {}

    found = open_store(tmp_path, tmp_path, "key", np.uint32, build)
    assert found.values.tolist() == [0, 1, 2, 3, 4, 5, 6, 70_000, 9, 5]
    assert found.marks is not None and found.marks.tolist() == [0] * 8 + [NOT_SUPERVISED, 0]
    assert found.starts.tolist() == [0, 7, 10] and found.facts["max_value"] == 70_000


def test_equal_records_have_equal_contents_on_either_strand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_BLOCK", 3)
    path = tmp_path / "x.fa"
    path.write_text(">a\nAACGTTN-RX\n>b\naacguuN-rx\n>c\nXY-NAACGTT\n>d\nAACGTTN-RR\n")
    found = open_fasta(path, tmp_path / "cache")
    contents = [content.tobytes() for content in found.content]
    assert contents[0] == contents[1] == contents[2] != contents[3]
    assert found.flipped[0] == found.flipped[1] != found.flipped[2]
