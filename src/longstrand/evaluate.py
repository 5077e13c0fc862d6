"""Held-out loss by position: how well a model uses the context that stands before each token."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor

from longstrand.buckets import Bucket, BucketSums, check_edges, compare, default_edges, mean_nats
from longstrand.config import Source
from longstrand.data import Data, Pack, open_data, open_evaluation
from longstrand.data.pack import NO_TARGET
from longstrand.errors import CheckFailed, UserError
from longstrand.memory import Levers
from longstrand.parallel import Mesh, all_ranks, from_all, one_process, said_once, together
from longstrand.peak_memory import PeakMemory
from longstrand.series import Series, append_series, series_from
from longstrand.trained import Trained, load_trained
from longstrand.wording import Unit, count, tokens_range, unit_for

__all__ = [
    "ScoresTokens",
    "append_series",
    "by_position",
    "compare",
    "default_edges",
    "evaluate_series",
    "run_evaluation",
]


class ScoresTokens(Protocol):
    """What evaluation needs of a model."""

    def token_logprobs(self, pack: Pack, levers: Levers) -> Tensor:
        """Natural log-probability of each target of the pack, [T]."""
        ...


def by_position(model: ScoresTokens, packs: Iterable[Pack], edges: Sequence[int], tile: int) -> list[Bucket]:
    """Mean loss by the number of context tokens: of the same document, before the target.

    nats = summed weight * -log p / summed weight over all documents, so the value does not depend on how the
    documents are packed. Bucket [start, end) holds the targets with start..end-1 context tokens, the last one
    also those with exactly its end. `low` and `high` bound a 95 % bootstrap interval over documents with a
    fixed seed; with one document they equal `nats` (see `sequences`). An empty bucket: tokens 0, nats None.

    Raises:
        UserError: edges that do not increase, or targets with more context than the last edge; to count those
            instead, use `evaluate_series`.
        CheckFailed: a log-probability that is not finite.
    """
    sums = _sum_by_position(model, packs, edges, tile, one_process())
    if sums.beyond:
        raise UserError(
            f"{sums.beyond:,} targets have more context than the last bucket edge ({edges[-1]:,} tokens): "
            "raise the length, or cut the sequences"
        )
    return mean_nats(sums)[0]


def evaluate_series(
    model: ScoresTokens,
    packs: Iterable[Pack],
    edges: Sequence[int],
    tile: int,
    name: str,
    step: int,
    mesh: Mesh | None = None,
    between: Callable[[], None] = lambda: None,
) -> Series:
    """One evaluation as evaluate.json holds it: buckets, totals, and sums per document for paired intervals.

    Targets with more context than the last edge are counted in `beyond`, those with weight 0 in `masked`.

    Args:
        packs: those of this data rank. Of D ranks, rank d has packs d, d + D, d + 2D, ... of all, and every rank gets
            the series of all of them, in their order; some may have one less than others.
        mesh: the ranks that score together; None: this process alone.
        between: called before each pass, by all ranks alike; what it raises ends the evaluation.

    Raises:
        UserError: edges that do not increase.
        CheckFailed: a log-probability that is not finite.
    """
    sums = _sum_by_position(model, packs, edges, tile, mesh or one_process(), between)
    return series_from(sums, name, step)


def run_evaluation(
    target: Path,
    data: Sequence[str],
    length: int,
    *,
    buckets: str | int = "doubling",
    tokenizer: str | None = None,
    as_json: bool = False,
    context: int | None = None,
    expert: int | None = None,
) -> Series:
    """`longstrand evaluate`: scores a model on files and prints a table, or JSON in nats.

    With several processes each calls it with the same arguments, and the first one alone prints.

    The files are read as the run's recipe says (tokenizer, letters, families), for a Hugging Face folder with the
    defaults, and a run is scored with its own number of threads. What the readers skip, and tokens that stand for text
    the tokenizer does not know, are counted below the table and under "skipped" and "unknown_tokens".

    Args:
        target: a run, one of its checkpoints, or a Hugging Face folder.
        data: FASTA, JSONL or token files, or globs.
        length: tokens of a sequence.
        buckets: "doubling", or the width of equal buckets.
        tokenizer: of a Hugging Face folder, as `data.tokenizer`; a run has its own.
        context, expert: sizes of these axes on several processes; None: as the run was trained.

    Raises:
        UserError: the target or the data cannot be used, or they do not fit each other.
        CheckFailed: a log-probability that is not finite; or an op would not run in the form that the run's
            `kernels.require` names.
    """
    world = all_ranks()
    with together(world):
        trained = load_trained(target, outlined=world.size > 1)
    mesh = trained.mesh(context, expert)
    errors = Console(stderr=True, soft_wrap=True, quiet=not mesh.first)

    def say(note: str | None) -> None:
        if note is not None:
            errors.print(note, markup=False, highlight=False)

    say(f"CPU kernels: {trained.use_settings()}")
    say(trained.beyond(length))
    with together(mesh.world):
        held_out = _open_files(trained, data, length, tokenizer)
        documents = held_out.documents("held_out", length=length).dealt(mesh.data.rank, mesh.data.size)
        edges = default_edges(length, buckets)
    say(_shared_with_training(trained, held_out))
    trained.spread(mesh)
    trained.require_forms(length)
    progress = track(documents, "scoring", console=errors, transient=True, disable=as_json)
    with PeakMemory() as memory:
        began = time.perf_counter()
        name, step = trained.name, trained.step
        series = evaluate_series(trained.model, progress, edges, trained.tile, name, step, mesh)
        seconds, peak = time.perf_counter() - began, memory.take()
    scored = series["tokens"] + series["masked"]
    say(
        f"{scored:,} targets in {seconds:,.1f} s ({scored / seconds:,.0f} per second), peak {peak / 2**30:.2f} GiB"
    )
    ledger = held_out.ledger.as_dict()
    skipped = _skipped(ledger)
    unknown = sum(source["unknown_tokens"] for source in ledger["sources"])
    if not mesh.first:
        return series
    if as_json:
        head = {"version": 1, "unit": "nats", "length": length}
        shown = {**head, **series, "skipped": skipped, "unknown_tokens": unknown}
        Console(soft_wrap=True).out(json.dumps(shown, allow_nan=False), highlight=False)
    else:
        formats = [source["format"] for source in ledger["sources"]]
        _print_table(series, unit_for(held_out.section.tokenizer, formats), skipped, unknown)
    return series


@dataclass(frozen=True)
class _Scored:
    """What is kept of one pack.

    Args:
        ids: fingerprints of its documents.
        sums: weights and weighted nats of each document and bucket, [2, S, B].
        tokens: targets with a weight above 0, [B].
    """

    ids: list[str]
    sums: np.ndarray
    tokens: np.ndarray
    masked: int
    beyond: int


def _sum_by_position(
    model: ScoresTokens,
    packs: Iterable[Pack],
    edges: Sequence[int],
    tile: int,
    mesh: Mesh,
    between: Callable[[], None] = lambda: None,
) -> BucketSums:
    """Sums per document and bucket; packs are drawn one at a time and none is kept."""
    with said_once(mesh.world, UserError):
        edges = check_edges(edges)
    own: list[_Scored] = []
    for pack in _passes(packs, mesh):
        between()
        before = mesh.data.rank + mesh.data.size * sum(len(one.ids) for one in own)
        # A rank without a document takes part: weights and experts are reached by all ranks at once. What fails here
        # on one rank alone ends its process: others may wait for it in an exchange.
        logprobs = _logprobs(model, Pack.without_target() if pack is None else pack, tile, mesh)
        with together(mesh.world):  # judged and summed, without an exchange: what one rank refuses all refuse
            if pack is not None:
                own.append(_score(pack, logprobs, edges, before))
    scored = _in_order(from_all(mesh.data, own))
    num_buckets = len(edges) - 1
    sums = [one.sums for one in scored] or [np.zeros((2, 0, num_buckets))]
    weight, nats = np.concatenate(sums, axis=1)
    return BucketSums(
        edges,
        tuple(fingerprint for one in scored for fingerprint in one.ids),
        weight,
        nats,
        tuple(sum((one.tokens for one in scored), np.zeros(num_buckets, dtype=np.int64)).tolist()),
        sum(one.masked for one in scored),
        sum(one.beyond for one in scored),
    )


def _passes(packs: Iterable[Pack], mesh: Mesh) -> Iterator[Pack | None]:
    """The packs of this rank, and None while others still have some: all ranks take part in every pass."""
    own = iter(packs)
    pack = next(own, None)
    while mesh.data.largest(int(pack is not None)):
        yield pack
        pack = next(own, None)


def _in_order(dealt: Sequence[Sequence[_Scored]]) -> list[_Scored]:
    """What the ranks scored, one pack of each in turn, as they were dealt."""
    passes = max(map(len, dealt))
    return [own[number] for number in range(passes) for own in dealt if number < len(own)]


def _score(pack: Pack, logprobs: Tensor, edges: Sequence[int], documents_before: int) -> _Scored:
    nats = _target_nats(pack, logprobs, documents_before)
    num_buckets = len(edges) - 1
    bucket = _bucket_of_targets(pack, edges)
    scored = (pack.targets != NO_TARGET) & (pack.weight != 0)
    masked = int((pack.targets != NO_TARGET).sum() - scored.sum())
    beyond = int((scored & (bucket == num_buckets)).sum())
    scored &= bucket < num_buckets
    return _Scored(
        ids=_fingerprints(pack),
        sums=_document_sums(pack, nats, bucket, scored, num_buckets),
        tokens=np.bincount(bucket[scored].numpy(), minlength=num_buckets),
        masked=masked,
        beyond=beyond,
    )


def _target_nats(pack: Pack, logprobs: Tensor, documents_before: int) -> Tensor:
    """-log p of each target, [T]; 0 where there is no target."""
    if bool((pack.weight < 0).any()):
        raise UserError("evaluation: a target has a negative weight; weights must be 0 or above")
    bad = ~torch.isfinite(logprobs) & (pack.targets != NO_TARGET)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        document = documents_before + int(torch.searchsorted(pack.starts, first, right=True)) - 1
        raise CheckFailed(
            f"evaluation: {int(bad.sum()):,} log-probabilities are not finite, the first in document "
            f"{document} at token {int(pack.offsets[first]):,}; the weights or the precision are at fault"
        )
    return -logprobs


def _logprobs(model: ScoresTokens, pack: Pack, tile: int, mesh: Mesh) -> Tensor:
    """log p of each target in float64, [T], on all ranks that share the pack; 0 where there is no target."""
    with torch.no_grad():
        own = model.token_logprobs(pack, levers=Levers(tile=tile)).detach().to("cpu", torch.float64)
    return mesh.context.sum(own, "log-probabilities")


def _bucket_of_targets(pack: Pack, edges: Sequence[int]) -> Tensor:
    """Bucket of each position's target, [T]; B beyond the last edge."""
    context = pack.offsets + 1
    bucket = torch.bucketize(context, torch.tensor(edges), right=True) - 1
    return torch.where(context == edges[-1], len(edges) - 2, bucket)


def _document_sums(pack: Pack, nats: Tensor, bucket: Tensor, scored: Tensor, num_buckets: int) -> np.ndarray:
    """Summed weights and summed weighted nats of each document and bucket: [2, S, B] in float64."""
    document = torch.arange(pack.num_documents).repeat_interleave(pack.lengths)
    cell = (document * num_buckets + bucket)[scored].numpy()
    weight = pack.weight.double()[scored].numpy()
    shape, cells = (pack.num_documents, num_buckets), pack.num_documents * num_buckets
    summed = [
        np.bincount(cell, weights=values, minlength=cells).reshape(shape)
        for values in (weight, weight * nats[scored].numpy())
    ]
    return np.stack(summed)


def _fingerprints(pack: Pack) -> list[str]:
    """A hash of each document's tokens and weights."""
    found = []
    for start, end in zip(pack.starts[:-1].tolist(), pack.starts[1:].tolist(), strict=True):
        digest = hashlib.blake2b(pack.tokens[start:end].contiguous().numpy().tobytes(), digest_size=8)
        digest.update(pack.weight[start:end].contiguous().numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def _open_files(trained: Trained, data: Sequence[str], length: int, tokenizer: str | None) -> Data:
    like = trained.recipe.data if trained.recipe is not None else None
    if like is not None and tokenizer is not None:
        raise UserError(f"--tokenizer {tokenizer}: {trained.name} has its own, {like.tokenizer}; remove it")
    sources = [Source(path=path) for path in data]
    opened = open_evaluation(sources, length, like=like, model_folder=trained.folder, tokenizer=tokenizer)
    vocabulary = trained.model.architecture.vocab_size
    if opened.max_token >= vocabulary:
        raise UserError(
            f"{trained.name}: the data has token {opened.max_token}, and the model's vocabulary has {vocabulary}; "
            "evaluate it on data of its own tokenizer (--tokenizer, for a model folder)"
        )
    return opened


def _shared_with_training(trained: Trained, held_out: Data) -> str | None:
    """A note where the files hold letters that the run was trained on, or where that cannot be known."""
    if trained.recipe is None:
        return None
    try:
        training = open_data(trained.recipe.data, seed=trained.recipe.run.seed, model_folder=trained.folder)
    except UserError as error:
        return f"note: not compared with the training data ({error})"
    try:
        training.check_apart_from(held_out)
    except UserError as error:
        return f"note: {error}"
    return None


def _skipped(ledger: dict[str, Any]) -> list[dict[str, Any]]:
    """What the readers left out, per source and cause."""
    return [
        {"path": source["path"], "cause": cause.replace("_", " "), **counted}
        for source in ledger["sources"]
        for part in source["split"].values()
        for cause, counted in part["skipped"].items()
    ]


def _print_table(series: Series, unit: Unit, skipped: list[dict[str, Any]], unknown_tokens: int) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    title = f"{escape(series['name'])}: loss by position, {unit.name}"
    table = Table(title=title, title_justify="left", min_width=78)
    table.add_column("context tokens")
    for name in ("tokens scored", "sequences", unit.name, "95 % interval"):
        table.add_column(name, justify="right")
    for bucket in series["buckets"]:
        table.add_row(tokens_range(bucket["start"], bucket["end"]), *_cells(bucket, unit))
    table.add_section()
    table.add_row("all", *_cells(series, unit), style="bold")
    console.print(table)
    if series["masked"]:
        console.print(f"not scored: {count(series['masked'])} masked targets")
    if unknown_tokens:
        console.print(f"read as the unknown token: {count(unknown_tokens)}")
    for line in skipped:
        console.print(
            f"skipped, {line['cause']}: {count(line['documents'])} documents, {count(line['tokens'])} tokens "
            f"of {line['path']}",
            markup=False,
        )


def _cells(row: Bucket | Series, unit: Unit) -> list[str]:
    interval = f"{unit.show(row['low'])} to {unit.show(row['high'])}"
    if row["sequences"] < 2:
        interval = "nothing scored" if row["sequences"] == 0 else "one sequence"
    return [count(row["tokens"]), count(row["sequences"]), unit.show(row["nats"]), interval]
