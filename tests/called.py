"""The command line, called in this process as the installed command does it."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from longstrand.cli import main


class Called(NamedTuple):
    code: int
    out: str
    err: str


def caller(monkeypatch: pytest.MonkeyPatch, capsys, *command: str) -> Callable[..., Called]:
    """Calls `longstrand COMMAND ...` with what it is given."""

    def run(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["longstrand", *command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Called(ended.value.code or 0, captured.out, captured.err)

    return run
