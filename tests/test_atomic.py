"""Files are replaced as a whole, whatever interrupts the writing."""

import os

import pytest

from longstrand.atomic import write_atomic


def test_an_interrupted_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "data.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "old"
