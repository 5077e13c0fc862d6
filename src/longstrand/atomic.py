"""Writes a file as a whole: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from longstrand.errors import UserError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces `path` by `content` (text as UTF-8): a temporary file beside it, synced, then renamed.

    Raises:
        UserError: the folder is absent or not writable, or the disk is full; the old file is untouched.
    """
    try:
        handle, name = _beside(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from error
    try:
        _fill(handle, content)
        os.replace(name, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}; the old file is untouched") from error
    finally:
        Path(name).unlink(missing_ok=True)  # there only where something failed, a signal included


def write_new(path: Path, content: str | bytes) -> None:
    """Writes a file that is not there yet, as a whole or not at all; it never overwrites.

    Raises:
        OSError: it is there (FileExistsError), or cannot be written; nothing is left then.
    """
    handle, name = _beside(path)
    try:
        _fill(handle, content)
        try:
            os.link(name, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            _claim(path, name)
    finally:
        Path(name).unlink(missing_ok=True)


def _claim(path: Path, name: str) -> None:
    """Takes the name by an empty file, which the whole one then replaces."""
    path.open("x").close()
    try:
        os.replace(name, path)
    except BaseException:
        path.unlink()
        raise


def _beside(path: Path) -> tuple[int, str]:
    """A temporary file in the same folder."""
    return tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)


def _fill(handle: int, content: str | bytes) -> None:
    """Writes all of it, synced, readable by others; closes the file."""
    with os.fdopen(handle, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o644)
