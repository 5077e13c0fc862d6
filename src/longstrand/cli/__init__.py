"""The command line: each command calls one function of the layers below; an error is one line and a code."""

from __future__ import annotations

import sys
import traceback

import typer

from longstrand.cli.commands import app
from longstrand.errors import LongstrandError, RunFailed, UserError


def main() -> None:
    """Runs the command line and exits.

    Codes: 0 done; 1 failed; 2 bad command, config or input; 3 a check failed; 130, 143 stopped by a signal.
    `--debug`, anywhere on the line, shows the traceback that a one-line error leaves out.
    """
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        sys.exit(app([a for a in arguments if a != "--debug"], prog_name="longstrand", standalone_mode=False))
    except typer.TyperException as error:
        _refuse(UserError(f"{error.format_message()} (longstrand --help lists commands and options)"), debug)
    except (LongstrandError, OSError, MemoryError) as error:
        _refuse(error if isinstance(error, LongstrandError) else RunFailed(_describe(error)), debug)
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "out of memory" not in str(error):  # torch's two wordings
            raise
        _refuse(RunFailed(_describe(MemoryError())), debug)


def _refuse(error: LongstrandError, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    kind = "" if error.exit_code > 128 else "error: "  # a run that a signal stopped did as it was told
    typer.echo(kind + " ".join(str(error).split("\n")), err=True)
    sys.exit(error.exit_code)


def _describe(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return "out of memory; lower memory.tile or data.length, or use a machine with more"
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; check the path, its permissions and the space on its disk"
