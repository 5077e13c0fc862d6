"""Files are replaced as a whole, whatever interrupts the writing."""

import errno
import os

import pytest

from longstrand.atomic import write_atomic, write_new


def test_an_interrupted_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "data.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "old"


def test_a_new_file_is_whole_or_not_there_and_never_overwrites(tmp_path, monkeypatch):
    path = tmp_path / "new.txt"
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _fails)
        with pytest.raises(OSError, match="No space left"):
            write_new(path, "text")
    assert list(tmp_path.iterdir()) == []
    write_new(path, "text")
    with pytest.raises(FileExistsError):
        write_new(path, "other")
    assert [each.name for each in tmp_path.iterdir()] == ["new.txt"] and path.read_text() == "text"


def test_a_file_system_without_links_has_the_same_rules(tmp_path, monkeypatch):
    path = tmp_path / "new.txt"
    monkeypatch.setattr(os, "link", _fails)
    write_new(path, b"text")
    with pytest.raises(FileExistsError):
        write_new(path, "other")
    assert [each.name for each in tmp_path.iterdir()] == ["new.txt"] and path.read_text() == "text"
    monkeypatch.setattr(os, "replace", _fails)
    with pytest.raises(OSError, match="No space left"):
        write_new(tmp_path / "another.txt", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["new.txt"]


def _fails(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
