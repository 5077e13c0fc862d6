"""What several commands read from their options."""

from __future__ import annotations

from longstrand.config import parse_length
from longstrand.errors import UserError


def tokens_of(option: str, text: str, least: int = 2) -> int:
    """The tokens that an option gives.

    Raises:
        UserError: naming the option, what is no number of tokens, or fewer than `least`.
    """
    try:
        tokens = parse_length(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None
    if tokens < least:
        raise UserError(f"{option} {text}: must be at least {least} token{'s' * (least > 1)}")
    return tokens
