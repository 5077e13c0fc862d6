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
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}; the old file is untouched") from error
    finally:
        Path(name).unlink(missing_ok=True)  # there only where something failed, a signal included
