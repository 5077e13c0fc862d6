"""The command line: each command calls one function of the layers below; an error is one line and a code."""

from __future__ import annotations

import errno
import os
import resource
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from typing import NoReturn

import typer
from pydantic import ValidationError

from longstrand.cli import audit as _audit  # noqa: F401 (brings its command)
from longstrand.cli import probe as _probe  # noqa: F401 (brings its command)
from longstrand.cli.commands import app
from longstrand.console import named, shown
from longstrand.errors import LongstrandError, RunFailed, UserError
from longstrand.rank_process import leave, under_torchrun
from longstrand.wording import size_bytes

_TRACE = "\nTraceback (most recent call last)"  # of another process: no one line says what it failed at
_TORCH_OUT_OF_MEMORY = ("allocate memory", "out of memory", "Storage size calculation overflowed")
_NO_STACK = "can't start new thread"  # where a limit is: its stack could not be mapped


def main() -> None:
    """Runs the command line and exits.

    Codes: 0 done; 1 failed; 2 bad command, config or input; 3 a check failed; 130, 143 stopped by a signal.
    `--debug`, anywhere on the line, shows the traceback that a one-line error leaves out.
    """
    try:
        with redirect_stderr(shown(sys.stderr)), redirect_stdout(named(sys.stdout)):
            _run(sys.argv[1:])
    except SystemExit as ended:
        if under_torchrun(os.environ):
            leave(ended.code if isinstance(ended.code, int) else 0)
        raise


def _run(arguments: list[str]) -> NoReturn:
    debug = "--debug" in arguments
    try:
        _check_text(arguments)
        sys.exit(app([a for a in arguments if a != "--debug"], prog_name="longstrand", standalone_mode=False))
    except typer.TyperException as error:
        _refuse(UserError(f"{error.format_message()} (longstrand --help lists commands and options)"), debug)
    except ValidationError as error:  # an option that a setting is made of
        _refuse(UserError(_describe_option(error)), debug)
    except (LongstrandError, OSError, MemoryError) as error:
        _refuse(error if isinstance(error, LongstrandError) else RunFailed(_describe(error)), debug)
    except (ImportError, SystemError) as error:  # of a library whose parts found no room to be mapped
        if not _mapping_limit():
            raise
        why = str(error).strip().rpartition("\n")[2]
        _refuse(RunFailed(f"a library cannot be loaded ({why}); {_mapping_limit()}"), debug)
    except RuntimeError as error:
        wordings = (*_TORCH_OUT_OF_MEMORY, *[_NO_STACK] * bool(_mapping_limit()))
        if not any(wording in str(error) for wording in wordings):
            raise
        _refuse(RunFailed(_describe(MemoryError())), debug)


def _check_text(arguments: list[str]) -> None:
    """A recipe is UTF-8, so it cannot name a file whose name is not."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(f"{argument!r}: its bytes are not UTF-8; rename the file") from None


def _refuse(error: LongstrandError, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    if error.said_by_another:
        sys.exit(error.exit_code)
    kind = "" if error.exit_code > 128 else "error: "  # a run that a signal stopped did as it was told
    text = str(error)
    typer.echo(kind + (text if _TRACE in text else " ".join(text.split("\n"))), err=True)
    sys.exit(error.exit_code)


def _describe_option(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    value = "" if isinstance(found["input"], dict) else f" = {found['input']!r}"
    place = f"{'.'.join(map(str, found['loc']))}{value}: ".removeprefix(": ")
    return f"{place}{found['msg'].removeprefix('Value error, ')}; correct the option"


def _describe(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        remedy = _mapping_limit() or "use a machine with more"
        return f"out of memory; lower memory.tile or data.length, or {remedy}"
    if error.filename == "stdout":
        return f"stdout: {error.strerror or error}; send it to a file or a disk with space, and run the command again"
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; check the path, its permissions and the space on its disk"


def _mapping_limit() -> str:
    """As a remedy, the limit of this process's address space; empty: there is none."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"raise the limit of what a process may map, {size_bytes(soft)} (ulimit -v)"
