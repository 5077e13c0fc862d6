"""Reads a recipe from TOML, with `--set` overrides; every refusal is one line."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longstrand.config.fields import dotted
from longstrand.config.messages import describe_refusal
from longstrand.config.records import Recipe
from longstrand.errors import UserError

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe file, or a shipped recipe by its name, and applies `a.b=c` overrides to it.

    An override's value is parsed as TOML; text that is no TOML value and opens no quote or bracket is a
    string. A number in its key is an entry of a list: `data.sources.0.path=x.fa`.

    Raises:
        UserError: an unreadable file, broken TOML, an unknown setting, a value outside its rule.
    """
    text = _read_text(Path(path))
    return read_recipe_text(text, overrides, name=str(path))


def read_recipe_text(text: str, overrides: list[str] | None = None, name: str = "recipe") -> Recipe:
    """Reads a recipe from its TOML text; `name` stands in messages."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number of 5,000 digits
        raise UserError(
            f"{name}: not valid TOML: {error}; strings need quotes, and a setting is: name = value"
        ) from None
    overridden: list[str] = []
    for override in overrides or []:
        key, value = _parse_override(override)
        _set(values, key, value, override)
        overridden.append(".".join(key))
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        path, message = describe_refusal(error, values)
        place = f"{dotted(path)}."
        from_override = any(place.startswith(f"{key}.") or f"{key}.".startswith(place) for key in overridden)
        raise UserError(f"{f'{name} with --set' if from_override else name}: {message}") from None


def shipped_recipes() -> dict[str, str]:
    """Names and texts of the recipes that come with the package."""
    folder = resources.files("longstrand") / "recipes"
    found = (
        (file for file in folder.iterdir() if file.name.endswith(".toml")) if folder.is_dir() else iter(())
    )
    return {
        file.name.removesuffix(".toml"): file.read_text("utf-8")
        for file in sorted(found, key=lambda f: f.name)
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        shipped = shipped_recipes()
        if str(path) in shipped:
            return shipped[str(path)]
        raise UserError(
            f"{path}: no such recipe; give a file that longstrand init wrote, or one of: {', '.join(shipped)}"
        ) from None
    except IsADirectoryError:
        inside = path / "run.toml"
        hint = f"give {inside}" if inside.is_file() else "give the TOML file in it"
        raise UserError(f"{path}: a folder, where a recipe file is needed; {hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the recipe as UTF-8 text") from None
    except ValueError:
        raise UserError(f"{str(path)!r}: no valid file name; give a TOML file") from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if "\n" in override:
        raise UserError(
            f"--set {key.splitlines()[0]}: holds a line break; one setting at a time, repeat --set"
        )
    if not equals or not _KEY.fullmatch(key):
        raise UserError(f"--set {override}: must be section.name=value, for example train.lr=1e-4")
    if not text:
        raise UserError(f"--set {override}: no value; write {key}='\"\"' for an empty text")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text[0] in "[{\"'" or not isinstance(error, tomllib.TOMLDecodeError):
            raise UserError(
                f"--set {override}: not a valid TOML value: {error}; check quotes and brackets"
            ) from None
        return key.split("."), text
    return key.split("."), parsed["value"]


def _set(values: dict[str, Any], key: list[str], value: Any, override: str) -> None:
    target: Any = values
    for depth, part in enumerate(key):
        here = ".".join(key[:depth])
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                raise UserError(
                    f"--set {override}: {here} is a list of {len(target)}; its entries are 0, 1, ..."
                )
            index: Any = int(part)
        elif isinstance(target, dict):
            index = part
        else:
            raise UserError(f"--set {override}: {here} is a single value and has no setting {part}")
        if depth == len(key) - 1:
            target[index] = value
        else:
            if isinstance(target, dict) and not isinstance(target.get(index, {}), dict | list):
                raise UserError(
                    f"--set {override}: {'.'.join(key[: depth + 1])} is a single value and has no settings"
                )
            target = target.setdefault(index, {}) if isinstance(target, dict) else target[index]
