"""`init`: a first recipe for the user's data, with every setting explained."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from longstrand.config import Recipe, dump_toml
from longstrand.config.base import has_its_home
from longstrand.errors import UserError

_ENDINGS = (".gz", ".bgz", ".fa", ".fasta", ".fna", ".jsonl", ".json", ".txt")
_HEADER = """\
# What to train, on what, and how. Lines that begin with "# name =" are settings that are absent.
#   longstrand train {path} --dry-run    checks it against the data
#   longstrand train {path}
# The four to look at first: data.split (what is held out), train.steps, train.lr, memory.tile.

"""


def write_recipe(data: str, length: int, model: str, out: Path | None) -> Path:
    """Writes a commented recipe and returns its path.

    Args:
        data: a file or a glob.
        length: tokens of a sequence.
        model: a Hugging Face folder (its weights are loaded), or a config (weights are drawn).
        out: the file to write; None: named after the data, in the working directory.

    Raises:
        UserError: no such data, or the file exists.
    """
    if not has_its_home(data):
        raise UserError(f'--data {data}: no home folder is known for its "~"; write the path in full')
    pattern = str(Path(data).expanduser())  # as `data.sources` is read
    if not any(Path(found).is_file() for found in [pattern, *glob.glob(pattern, recursive=True)]):
        remedy = "give a file, or a glob in quotes" if Path(data).is_dir() else "check the path"
        raise UserError(f"--data {data}: no such file; {remedy}")
    stem = _stem(data)
    path = out or Path(f"{stem}.toml")
    text = _HEADER.format(path=path) + dump_toml(Recipe.model_validate(_settings(data, length, model, stem)))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path}: exists, and is never overwritten; remove it or choose --out") from None
    except OSError as error:
        if path.is_file():  # begun here, since "x" opens no other, and the disk did not take all of it
            path.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None
    return path


def _settings(data: str, length: int, model: str, stem: str) -> dict[str, Any]:
    """Sensible values; a model from random weights needs its indexer trained and a higher rate."""
    drawn = not Path(model).is_dir()
    return {
        "run": {"out": f"runs/{stem}"},
        "model": {"config" if drawn else "path": model},
        "data": {
            "sources": [{"path": data}],
            "length": length,
            "split": {"by": "record" if ".json" in Path(data).name else "region"},
        },
        "train": {
            "steps": 200,
            "lr": 2e-3 if drawn else 1e-5,
            "warmup_steps": 10,
            "indexer": "sparse" if drawn else "frozen",
            "save_every": 50,
        },
        "evaluate": {"sequences": 16},
    }


def _stem(data: str) -> str:
    name = Path(data).name
    while name.endswith(_ENDINGS):
        name = name.rpartition(".")[0]
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip("._") or "recipe"
