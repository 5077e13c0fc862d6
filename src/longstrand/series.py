"""evaluate.json: the series of a run, appended as a whole file and read with checks; no torch.

A series is one evaluation: a name (before, after, control before, control after), the step, the loss of each
bucket, and the sums per document from which paired intervals are computed.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeGuard

import numpy as np

from longstrand.atomic import write_atomic
from longstrand.buckets import Bucket, BucketSums, Floats, check_edges, mean_nats
from longstrand.errors import UserError

VERSION = 1


class DocumentRow(TypedDict):
    """Sums of one document; buckets after its last one are left out."""

    id: str
    weight: list[float]
    nats: list[float]


class Series(TypedDict):
    """One evaluation. `masked`: targets with weight 0. `beyond`: targets past the last edge, in no bucket."""

    name: str
    step: int
    tokens: int
    nats: float | None
    low: float | None
    high: float | None
    sequences: int
    masked: int
    beyond: int
    buckets: list[Bucket]
    documents: NotRequired[list[DocumentRow]]


def series_from(sums: BucketSums, name: str, step: int) -> Series:
    """The series of one evaluation, as evaluate.json holds it."""
    buckets, overall = mean_nats(sums)
    documents = [
        DocumentRow(id=fingerprint, weight=_numbers(weight), nats=_numbers(nats))
        for fingerprint, weight, nats in zip(sums.ids, sums.weight, sums.nats, strict=True)
    ]
    return Series(
        name=name,
        step=step,
        tokens=overall["tokens"],
        nats=overall["nats"],
        low=overall["low"],
        high=overall["high"],
        sequences=overall["sequences"],
        masked=sums.masked,
        beyond=sums.beyond,
        buckets=buckets,
        documents=documents,
    )


def sums_from(series: Series) -> BucketSums:
    """The sums per document of a series.

    Raises:
        UserError: the series was written without its documents.
    """
    if "documents" not in series:
        raise UserError(
            f'series "{series["name"]}": holds no sums per document, so it has no paired intervals'
        )
    rows, buckets = series["documents"], series["buckets"]
    edges = (buckets[0]["start"], *(bucket["end"] for bucket in buckets))
    weight, nats = np.zeros((len(rows), len(buckets))), np.zeros((len(rows), len(buckets)))
    for number, row in enumerate(rows):
        weight[number, : len(row["weight"])] = row["weight"]
        nats[number, : len(row["nats"])] = row["nats"]
    return BucketSums(
        edges=edges,
        ids=tuple(row["id"] for row in rows),
        weight=weight,
        nats=nats,
        tokens=tuple(bucket["tokens"] for bucket in buckets),
        masked=series["masked"],
        beyond=series["beyond"],
    )


def append_series(run: Path, series: Series) -> None:
    """Adds a series to the run's evaluate.json, in place of one with the same name and step.

    The file is replaced as a whole: a killed process leaves the old file or the new one.

    Raises:
        UserError: the file is corrupt or cannot be written.
    """
    path = run / "evaluate.json"
    kept = [
        old for old in read_series(path) if (old["name"], old["step"]) != (series["name"], series["step"])
    ]
    content = {
        "version": VERSION,
        "unit": "nats",
        "length": max(one["buckets"][-1]["end"] for one in [*kept, series]),
        "series": [*kept, series],
    }
    write_atomic(path, json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n")


def read_series(path: Path) -> list[Series]:
    """The series of an evaluate.json, oldest first; none where there is no file.

    Raises:
        UserError: the file is not JSON, of another version, or a series is malformed.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it and evaluate again") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: a folder is in the place of this file; move it away") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot read: {error.strerror}; check its permissions and its disk"
        ) from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise UserError(f"{path}: not an evaluation of version {VERSION}; delete it and evaluate again")
    series = content.get("series")
    if not isinstance(series, list):
        raise UserError(f"{path}: series is not a list; delete it and evaluate again")
    for number, one in enumerate(series):
        problem = _problem(one)
        if problem:
            raise UserError(f"{path}: series {number}: {problem}; delete the file and evaluate again")
    return series


def is_number(value: Any) -> bool:
    """Whether a value read from JSON is a finite number, and a whole one within 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value read from JSON is a whole number from 0, within 64 bits."""
    return isinstance(value, int) and is_number(value) and value >= 0


def _numbers(row: Floats) -> list[float]:
    """The row without its trailing zeros, whole numbers as such."""
    last = np.flatnonzero(row)
    values = row[: last[-1] + 1].tolist() if len(last) else []
    return [int(value) if value.is_integer() else value for value in values]


def _problem(series: Any) -> str | None:
    """What is wrong with one series, or None."""
    if not isinstance(series, dict) or not isinstance(series.get("name"), str):
        return "has no name"
    for key in ("step", "tokens", "sequences", "masked", "beyond"):
        if not is_count(series.get(key)):
            return f"{key} = {series.get(key)!r} is not a count"
    buckets = series.get("buckets")
    if not isinstance(buckets, list) or not buckets or not all(isinstance(row, dict) for row in buckets):
        return "buckets is not a list of records"
    for row in [series, *buckets]:
        if not all(
            key in row and (row[key] is None or is_number(row[key])) for key in ("nats", "low", "high")
        ):
            return "nats, low or high is absent or not a number"
    if not all(
        is_count(bucket.get(key)) for bucket in buckets for key in ("start", "end", "tokens", "sequences")
    ):
        return "start, end, tokens or sequences of a bucket is not a count"
    if any(a["end"] != b["start"] for a, b in pairwise(buckets)):
        return "buckets do not follow each other"
    try:
        check_edges([buckets[0]["start"], *(bucket["end"] for bucket in buckets)])
    except UserError as error:
        return str(error)
    return _document_problem(series.get("documents", []), len(buckets))


def _document_problem(documents: Any, num_buckets: int) -> str | None:
    if not isinstance(documents, list):
        return "documents is not a list"
    for row in documents:
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            return "a document has no id"
        for key in ("weight", "nats"):
            values = row.get(key)
            if not isinstance(values, list) or len(values) > num_buckets or not all(map(is_number, values)):
                return f"{key} of document {row['id']} is not a list of at most {num_buckets} numbers"
    return None
