"""A conversation as text by the tokenizer folder's own chat template, assistant turns told apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longstrand.errors import UserError


class ChatTemplate:
    """The Jinja template of a Hugging Face tokenizer folder (chat_template.jinja or tokenizer_config.json)."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _to_json
        self.source = source
        self._special_tokens = special_tokens
        self._template = environment.from_string(source)

    def pieces(self, messages: Sequence[dict[str, str]], where: str) -> tuple[tuple[str, bool], ...]:
        """(text, supervised) pieces: what the template writes for each assistant turn after its generation prompt.

        Raises:
            UserError: the template refuses the messages, or writes a turn differently once later turns follow (then
                no stretch of the text is the turn).
        """
        pieces: list[tuple[str, bool]] = []
        done = ""
        whole = self._render(messages, False, where)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], True, where)
            after = self._render(messages[: number + 1], False, where)
            if not (before.startswith(done) and after.startswith(before) and whole.startswith(after)):
                raise UserError(
                    f"{where}: the chat template writes turn {number} differently once later turns follow; "
                    "give this conversation as prompt and completion"
                )
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        pieces.append((whole[len(done) :], False))
        return tuple(piece for piece in pieces if piece[0])

    def _render(self, messages: Sequence[dict[str, str]], generation: bool, where: str) -> str:
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=generation, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise UserError(f"{where}: the chat template refuses the messages: {error}") from error


def read_chat_template(
    folder: Path, config: dict[str, Any], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """The folder's chat template, or None where it has none.

    Raises:
        UserError: the template is not valid Jinja, or not UTF-8.
    """
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        return ChatTemplate(source, special_tokens) if isinstance(source, str) else None
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: the chat template is not valid Jinja: {error}") from error


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
