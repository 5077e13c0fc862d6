"""Evaluation by position, against plain Python loops over documents."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from longstrand import buckets
from longstrand.data import Pack
from longstrand.errors import CheckFailed, UserError
from longstrand.evaluate import append_series, by_position, compare, default_edges, evaluate_series
from longstrand.memory import Levers
from longstrand.series import read_series, sums_from


class Fake:
    """Log-probabilities from a formula of the target and its context; `skill` lowers it past a position."""

    def __init__(self, skill: float = 0.0, past: int = 0, poison: int | None = None) -> None:
        self.skill, self.past, self.poison = skill, past, poison

    def token_logprobs(self, pack: Pack, levers: Levers) -> torch.Tensor:
        context = pack.offsets + 1
        nats = nats_of(pack.targets, context) * torch.where(context >= self.past, 1 - self.skill, 1.0)
        if self.poison is not None:
            nats[self.poison] = math.nan
        return torch.where(pack.targets < 0, torch.zeros_like(nats), -nats)


def nats_of(target, context):
    return 1.0 + (target * 7919 % 101) / 101.0 + (context * 31 % 17) / 17.0


def documents(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 4, (length,), generator=generator) for length in lengths]


def expected(docs, edges, weights=None):
    """(tokens, nats) per bucket by loops over every target."""
    total = [[0, 0.0, 0.0] for _ in edges[1:]]
    for number, doc in enumerate(docs):
        for context in range(1, len(doc)):
            weight = 1.0 if weights is None else float(weights[number][context])
            if weight == 0 or context > edges[-1]:
                continue
            bucket = max(b for b in range(len(edges) - 1) if edges[b] <= context)
            total[bucket][0] += 1
            total[bucket][1] += weight * float(nats_of(doc[context].double(), context))
            total[bucket][2] += weight
    return [(tokens, nats / weight if weight else None) for tokens, nats, weight in total]


def layouts(docs):
    """Batch sizes 1, 2, 3 and everything in one row."""
    return [
        [Pack.from_documents(docs[i : i + n]) for i in range(0, len(docs), n)] for n in (1, 2, 3, len(docs))
    ]


def test_r11_the_loss_does_not_depend_on_how_documents_are_batched():
    docs = documents(3, 30, 300, 30, 3)
    edges = [0, 4, 29, 100, 299]
    rows = [by_position(Fake(), packs, edges, 64) for packs in layouts(docs)]
    for row in rows:
        assert [bucket["tokens"] for bucket in row] == [tokens for tokens, _ in expected(docs, edges)]
        assert [bucket["nats"] for bucket in row] == pytest.approx(
            [n for _, n in expected(docs, edges)], rel=1e-6
        )
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert rows[0] == by_position(Fake(), [Pack.from_documents(docs[::-1])], edges, 64)


def test_r11_long_documents_do_not_weigh_as_much_as_short_ones():
    docs = documents(3, 30, 300)
    series = evaluate_series(Fake(), [Pack.from_documents(docs)], [0, 300], 64, "before", 0)
    nats = [float(nats_of(doc[c].double(), c)) for doc in docs for c in range(1, len(doc))]
    assert series["tokens"] == len(nats) == 330
    assert series["nats"] == pytest.approx(sum(nats) / len(nats), rel=1e-6)


def test_the_last_bucket_takes_the_target_at_exactly_the_upper_edge():
    doc = documents(9)[0]
    row = by_position(Fake(), [Pack.from_documents([doc])], [0, 4, 8], 64)
    assert [bucket["tokens"] for bucket in row] == [3, 5]


def test_targets_past_the_last_edge_are_an_error_or_a_count_but_never_silent():
    packs = [Pack.from_documents(documents(3, 12))]
    with pytest.raises(UserError, match=r"3 targets have more context .*8 tokens"):
        by_position(Fake(), packs, [0, 4, 8], 64)
    series = evaluate_series(Fake(), packs, [0, 4, 8], 64, "before", 0)
    assert (series["beyond"], series["tokens"]) == (3, 10)


def test_an_empty_bucket_is_shown_with_no_tokens():
    row = by_position(Fake(), [Pack.from_documents(documents(5, 6))], [0, 8, 16], 64)
    assert (row[1]["tokens"], row[1]["nats"], row[1]["low"], row[1]["high"]) == (0, None, None, None)


def test_no_documents_give_empty_buckets():
    assert [bucket["tokens"] for bucket in by_position(Fake(), [], [0, 8, 16], 64)] == [0, 0]


def test_weights_weigh_the_mean_and_masked_targets_are_counted():
    docs = documents(20, 33)
    weights = [
        torch.tensor([random.Random(n).choice([0.0, 0.5, 1.0]) for _ in doc]) for n, doc in enumerate(docs)
    ]
    edges = [0, 10, 32]
    series = evaluate_series(Fake(), [Pack.from_documents(docs, weights)], edges, 64, "before", 0)
    assert [b["tokens"] for b in series["buckets"]] == [
        tokens for tokens, _ in expected(docs, edges, weights)
    ]
    assert [b["nats"] for b in series["buckets"]] == pytest.approx(
        [n for _, n in expected(docs, edges, weights)]
    )
    assert series["masked"] == sum(int((w[1:] == 0).sum()) for w in weights) > 0


def test_a_log_probability_that_is_not_finite_is_an_error_with_its_place():
    with pytest.raises(
        CheckFailed, match="1 log-probabilities are not finite, the first in document 1 at token 2"
    ):
        by_position(Fake(poison=7), [Pack.from_documents(documents(5, 9))], [0, 16], 64)


@pytest.mark.parametrize("edges", [[0], [0, 4, 4], [2, 8], [-1, 8], []])
def test_bucket_edges_that_make_no_ranges_are_refused(edges):
    with pytest.raises(UserError, match="bucket edges"):
        by_position(Fake(), [Pack.from_documents(documents(5))], edges, 64)


@pytest.mark.parametrize(
    ("length", "width", "edges"),
    [
        (16384, "doubling", [0, 1024, 2048, 4096, 8192, 16384]),
        (20000, "doubling", [0, 1024, 2048, 4096, 8192, 16384, 20000]),
        (1024, "doubling", [0, 1024]),
        (300, "doubling", [0, 300]),
        (1025, "doubling", [0, 1024, 1025]),
        (100, 32, [0, 32, 64, 96, 100]),
        (64, 32, [0, 32, 64]),
    ],
)
def test_default_edges_double_to_the_length_or_are_equal(length, width, edges):
    assert default_edges(length, width) == edges


def test_equal_buckets_at_512k_are_sixteen():
    assert len(default_edges(524288, 32768)) - 1 == 16


@pytest.mark.parametrize(("length", "width"), [(0, "doubling"), (8, 0), (8, "halving")])
def test_edges_that_cannot_be_made_are_refused(length, width):
    with pytest.raises(UserError, match=r"evaluate\.(length|buckets)"):
        default_edges(length, width)


def sums(nats, weight, edges=(0, 1024, 2048)):
    weight = np.broadcast_to(np.asarray(weight, dtype=float), np.shape(nats)).copy()
    ids = tuple(f"{number:04d}" for number in range(len(nats)))
    tokens = tuple(int(t) for t in weight.sum(axis=0))
    return buckets.BucketSums(tuple(edges), ids, weight, np.asarray(nats, dtype=float), tokens, 0, 0)


def test_intervals_hold_the_true_mean_about_as_often_as_they_say():
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(100):
        weight = generator.integers(500, 1500, (12, 1)).astype(float)
        nats = weight * np.exp(generator.normal(0, 0.5, (12, 1)))
        overall = buckets.mean_nats(sums(nats, weight, edges=(0, 1024)))[1]
        held += overall["low"] <= math.exp(0.125) <= overall["high"]
    assert held >= 86, (
        "95 % intervals held the true value too rarely (86: three standard deviations below 93)"
    )


def test_intervals_are_the_same_every_time_and_shrink_with_more_sequences():
    nats = np.random.default_rng(0).gamma(9, 100, (400, 2))
    few, many = sums(nats[:20], 1000), sums(nats, 1000)
    assert buckets.mean_nats(few) == buckets.mean_nats(few)
    width = [one["high"] - one["low"] for one in (buckets.mean_nats(few)[1], buckets.mean_nats(many)[1])]
    assert width[0] / width[1] == pytest.approx(math.sqrt(400 / 20), rel=0.4)


def test_grouping_very_many_documents_keeps_the_width_of_the_intervals(monkeypatch):
    nats = np.random.default_rng(0).gamma(9, 100, (5000, 1))
    grouped = buckets.mean_nats(sums(nats, 1000, edges=(0, 1024)))[1]
    monkeypatch.setattr(buckets, "RESAMPLED_ROWS", 5000)
    plain = buckets.mean_nats(sums(nats, 1000, edges=(0, 1024)))[1]
    assert grouped["nats"] == plain["nats"]
    assert grouped["high"] - grouped["low"] == pytest.approx(plain["high"] - plain["low"], rel=0.1)


def test_one_sequence_has_no_interval_and_says_so():
    row = by_position(Fake(), [Pack.from_documents(documents(30))], [0, 32], 64)[0]
    assert row["sequences"] == 1
    assert row["low"] == row["nats"] == row["high"]


def test_a_gain_that_only_context_gives_is_told_from_one_at_every_position():
    docs = documents(*[2049] * 12)
    edges = default_edges(2048)
    run = [
        sums_from(evaluate_series(model, [Pack.from_documents(docs)], edges, 64, "x", 0))
        for model in (Fake(), Fake(0.4, past=1024), Fake(0.1))
    ]
    context, everywhere = compare(run[0], run[1]), compare(run[0], run[2])
    assert context.early.relative.value == pytest.approx(0, abs=1e-7)
    assert context.late.relative.value == pytest.approx(0.4, rel=1e-5)
    assert context.overall.relative.value == pytest.approx(0.2, rel=1e-2)
    assert context.apart is True
    assert everywhere.late_over_early == pytest.approx(1, rel=1e-5)
    assert everywhere.apart is False
    assert [gain.relative.value for gain in everywhere.buckets] == pytest.approx([0.1, 0.1], rel=1e-5)


def test_a_control_loses_the_late_gain_only_if_there_was_one_and_little_of_it_is_left():
    generator = np.random.default_rng(4)
    before = sums(generator.gamma(9, 100, (20, 2)), 1000)

    def after(early: float, late: float) -> buckets.Comparison:
        noise = generator.normal(1, 0.01, (20, 2))
        return compare(before, sums(before.nats * noise * [1 - early, 1 - late], 1000))

    gain = after(0.02, 0.5)
    assert buckets.loses_late_gain(gain, after(0.02, 0.03)) is True
    assert buckets.loses_late_gain(gain, after(0.5, 0.5)) is True, (
        "a gain at every position is not a late one"
    )
    assert buckets.loses_late_gain(gain, after(0.02, 0.45)) is False
    assert buckets.loses_late_gain(after(0.05, 0.02), gain) is None


def test_pairing_makes_the_interval_of_a_gain_narrower_than_that_of_the_losses():
    difficulty = np.random.default_rng(3).gamma(4, 250, (30, 2))
    before, after = sums(difficulty, 1000), sums(difficulty * 0.9, 1000)
    loss = buckets.mean_nats(before)[1]
    gain = compare(before, after).overall.relative
    assert gain.value == pytest.approx(0.1)
    assert gain.high - gain.low < 1e-9 < loss["high"] - loss["low"]


def test_a_loss_that_rose_is_a_negative_gain_without_a_ratio():
    before = sums([[1000, 1000]] * 4, 1000)
    worse = compare(before, sums([[1100, 1050]] * 4, 1000))
    assert worse.overall.relative.value == pytest.approx(-0.075)
    assert worse.late_over_early is None
    assert worse.apart is True, "late is less bad than early, and certainly so"


def test_late_is_the_last_octave_and_early_the_first_1024_tokens():
    assert buckets.early_and_late(default_edges(16384)) == (1, 4)
    assert buckets.early_and_late(default_edges(524288, 32768)) == (1, 8)
    assert buckets.early_and_late(default_edges(8192, 512)) == (2, 8)
    assert buckets.early_and_late([0, 1024]) == (1, None)


def test_evaluations_of_other_documents_or_edges_are_not_compared():
    edges = [0, 8, 16]
    first = evaluate_series(Fake(), [Pack.from_documents(documents(9, 9))], edges, 64, "before", 0)
    other = evaluate_series(Fake(), [Pack.from_documents(documents(9, 9, seed=1))], edges, 64, "after", 1)
    with pytest.raises(UserError, match="did not score the same sequences"):
        compare(sums_from(first), sums_from(other))
    coarse = evaluate_series(Fake(), [Pack.from_documents(documents(9, 9))], [0, 16], 64, "after", 1)
    with pytest.raises(UserError, match="bucket edges differ"):
        compare(sums_from(first), sums_from(coarse))


def test_a_series_survives_the_file_and_replaces_only_itself(tmp_path: Path):
    docs = documents(5, 30, 17)
    weights = [torch.full((len(doc),), 0.3) for doc in docs]
    packs = [Pack.from_documents(docs, weights)]
    for name, step in (("before", 0), ("after", 9), ("after", 9)):
        append_series(tmp_path, evaluate_series(Fake(step / 10), packs, [0, 8, 32], 64, name, step))
    stored = read_series(tmp_path / "evaluate.json")
    assert [(one["name"], one["step"]) for one in stored] == [("before", 0), ("after", 9)]
    fresh = evaluate_series(Fake(0.9), packs, [0, 8, 32], 64, "after", 9)
    assert stored[1] == fresh
    read, kept = sums_from(stored[1]), sums_from(fresh)
    assert np.array_equal(read.nats, kept.nats)
    assert np.array_equal(read.weight, kept.weight)
    assert json.loads((tmp_path / "evaluate.json").read_text())["length"] == 32
    assert [path.name for path in tmp_path.iterdir()] == ["evaluate.json"], "no temporary file stays behind"


def test_a_write_that_fails_leaves_the_old_evaluation(tmp_path: Path, monkeypatch):
    packs = [Pack.from_documents(documents(5))]
    append_series(tmp_path, evaluate_series(Fake(), packs, [0, 8], 64, "before", 0))
    old = (tmp_path / "evaluate.json").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"evaluate\.json: cannot write: No space left"):
        append_series(tmp_path, evaluate_series(Fake(), packs, [0, 8], 64, "after", 1))
    assert (tmp_path / "evaluate.json").read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["evaluate.json"]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"version": 2, "series": []}',
        '{"version": 1, "series": {}}',
        '{"version": 1, "series": [{"step": 1}]}',
        '{"version": 1, "series": [{"name": "before", "step": -1}]}',
    ],
)
def test_a_corrupt_evaluation_is_one_line_with_the_remedy(tmp_path: Path, content: str):
    (tmp_path / "evaluate.json").write_text(content)
    with pytest.raises(UserError, match=r"evaluate\.json: .*evaluate again") as caught:
        read_series(tmp_path / "evaluate.json")
    assert "\n" not in str(caught.value)


ABSENT = object()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("nats",), "NaN"),
        (("nats",), ABSENT),
        (("buckets", 0, "low"), ABSENT),
        (("nats",), 10**400),
        (("tokens",), 10**400),
        (("buckets",), []),
        (("buckets", 0, "tokens"), 1.5),
        (("buckets", 0, "end"), 9),
        (("buckets", 1, "end"), 3),
        (("documents", 0, "id"), 4),
        (("documents", 0, "nats"), [1, 2, 3]),
        (("documents", 0, "weight"), ["1"]),
    ],
)
def test_a_damaged_series_is_named(tmp_path: Path, place, value):
    series = evaluate_series(Fake(), [Pack.from_documents(documents(9, 9))], [0, 4, 8], 64, "before", 0)
    append_series(tmp_path, series)
    path = tmp_path / "evaluate.json"
    content = json.loads(path.read_text())
    inner = content["series"][0]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if value is ABSENT:
        del inner[place[-1]]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="series 0: "):
        read_series(path)


def test_sums_of_a_long_document_are_as_small_as_those_of_a_short_one():
    edges = default_edges(4096)
    long = evaluate_series(Fake(), [Pack.from_documents(documents(4097))], edges, 64, "before", 0)
    assert len(json.dumps(long["documents"])) < 300


def test_reading_and_comparing_evaluations_never_imports_torch():
    code = "import sys, longstrand.series, longstrand.buckets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
