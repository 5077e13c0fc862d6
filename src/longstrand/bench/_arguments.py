"""Command lines of the measurements."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib.util import find_spec

from longstrand.config import parse_length
from longstrand.errors import UserError


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it is written, and every default."""


def command_line(name: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of `longstrand bench NAME`; `text` is its module's docstring."""
    return argparse.ArgumentParser(prog=f"longstrand bench {name}", description=text, formatter_class=_Help)


def parsed_length(text: str) -> int:
    """A length: "16384", "512k", "1M".

    Raises:
        argparse.ArgumentTypeError: no length, or less than 2 tokens, which have no target.
    """
    try:
        found = parse_length(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 2:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 2 tokens")
    return found


def parsed_count(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A name among these: argparse's own `choices` refuses an empty list of them."""
    known = list(names)

    def parsed(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text}: must be one of {', '.join(known)}")
        return text

    return parsed


def require_transformers(name: str, remedy: str = "") -> None:
    """Refuses a comparison before anything runs.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("transformers") is None:
        raise UserError(
            f'bench {name}: compares with transformers, which is not installed; pip install "longstrand[oracle]"'
            f"{remedy}"
        )
