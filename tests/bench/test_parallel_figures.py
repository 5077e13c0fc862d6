"""The figures of many ranks measure what they say, at sizes counted by hand, and fall short when they must."""

import functools

import pytest
import torch

from longstrand.bench import _small_models as small
from longstrand.bench import balance, exchanged, reshard, scale
from longstrand.memory import Levers
from longstrand.parallel import run_ranks


@pytest.fixture(scope="module")
def records():
    """Two ranks with two segments each, of a K and a D layer: 2 heads of 8 x 8, latents and keys of 8."""
    model = exchanged.drawn_model(small.architecture("KD"))
    return exchanged.judge(model, 2, (32, 64), 8)


def test_latents_and_pool_keys_are_all_that_is_gathered_per_token(records):
    dsa, _, rows = records
    assert dsa["detail"]["gathered"] == {32: 8 * 2 + 8 * 2 / 4, 64: 8 * 2 + 8 * 2 / 4}
    assert dsa["detail"]["halo"] == dict.fromkeys((32, 64), 3 * (8 + 8 + 8) * 2)
    assert dsa["pass"] and rows["pass"]


def test_what_kda_exchanges_is_that_of_its_segments(records):
    halo, a_state = 3 * 3 * 16 * 2, 2 * 8 * 8 * 4  # rows of q, k, v; the other rank's two segments, one head
    received = records[1]["detail"]["received"]
    assert received["forward"] == dict.fromkeys((32, 64), halo + 2 * a_state + a_state)
    assert received["backward"] == dict.fromkeys((32, 64), halo + 2 * a_state)
    assert records[1]["pass"]


@pytest.mark.parametrize("row", [(16,), (4, 16), (64,), (2, 6), (12,), (9,)])
def test_rows_of_hidden_states_and_queries_are_found(row):
    shape, key = small.architecture("KD"), ("forward", "KDA states")
    counts = {key: exchanged.Exchange(row, "float64", received=8, held=8)}
    record = exchanged._rows_record(counts, counts, (shape, 2))
    assert not record["pass"]
    assert record["measured"]["rows that are hidden states or queries"] == "KDA states"


def test_an_exchange_that_grows_with_the_length_is_found():
    key, shape = ("forward", "KDA states"), small.architecture("KD")
    short, long = ({key: exchanged.Exchange((8, 8), "float64", held=held)} for held in (8, 9))
    assert exchanged._rows_record(short, short, (shape, 2))["pass"]
    assert not exchanged._rows_record(short, long, (shape, 2))["pass"]


def test_imbalance_is_that_of_pairs_counted_one_by_one():
    lengths = balance.Lengths(40, 1.0)
    drawn = [lengths.drawn(120, seed) for seed in range(3)]
    assert [sum(each) for each in drawn] == [120] * 3 and drawn[0] != drawn[1]
    record = balance.log_normal(lengths, (2,), 120, 3)
    assert record["detail"]["worst"]["2 ranks"] == pytest.approx(max(map(_imbalance, drawn)))
    assert record["measured"]["with the fewest segments"] == "yes"
    assert balance.one_document((2, 4), 96)["pass"]
    assert not balance.one_document((2, 4), 97)["pass"]


def _imbalance(lengths):
    """Visible keys of every token, by the rank that the segments of `deal` give it."""
    keys = [offset + 1 for length in lengths for offset in range(length)]
    dealt = balance.deal(balance.starts(lengths), 2)
    load = [0, 0]
    for start, stop, owner in zip(dealt.edges, dealt.edges[1:], dealt.owners, strict=False):
        load[owner] += sum(keys[start:stop])
    return max(load) / (sum(load) / 2)


def test_cpu_time_is_judged_by_the_median_step_of_the_busiest_rank(monkeypatch):
    monkeypatch.setattr(balance, "run_ranks", lambda *_: [[1.0, 9.0, 1.0], [1.3, 1.0, 1.3]])
    record = balance.cpu_record("one document", [64], 2)
    assert record["measured"] == f"{1.3 / 1.15:.3f}"
    assert not record["pass"]


def test_cpu_seconds_of_a_rank_are_measured():
    model = small.model(vocab_size=256, dtype=torch.float32)
    for steps in run_ranks(2, balance.cpu_seconds, model, [40, 24], 2, start="fork", timeout=100):
        assert len(steps) == 2
        assert all(0 < seconds < 60 for seconds in steps)


def test_the_best_setting_is_the_figure_and_the_median_run_counts(monkeypatch):
    seconds = {1: [9.0, 8.0, 1.0] * 3, 2: [4.0, 9.0, 5.0] * 3}

    def run(tokens, ranks, levers):
        taken = seconds[ranks].pop(0) * (1 if levers.recompute or ranks == 2 else 1.2)
        return {"seconds": taken, "cpu_seconds": [taken] * ranks, "peak_bytes": [2**20] * ranks, "loss": 5.0}

    seconds = {ranks: [each for each in of[:3] for _ in scale.SETTINGS] for ranks, of in seconds.items()}
    monkeypatch.setattr(scale, "run", run)
    whole, *shown = scale.judge(64, 3)
    assert whole["measured"] == f"{8 * 1.2 / 5:.2f} (recompute = false)" and whole["pass"]
    assert [record["measured"] for record in shown] == [f"{8 / 5:.2f}"] * 2 + [f"{8 * 1.2 / 5:.2f}"]


def test_two_processes_take_the_step_of_one(monkeypatch):
    monkeypatch.setattr(scale, "run_ranks", functools.partial(run_ranks, start="fork", timeout=100))
    one, two = (scale.run(96, ranks, Levers(tile=32)) for ranks in (1, 2))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert len(two["cpu_seconds"]) == len(two["peak_bytes"]) == 2 and min(two["peak_bytes"]) > 2**20
    assert (
        not scale.compare({1: [one], 2: [one | {"loss": one["loss"] * 1.1}]})["loss_difference"] < scale.LOSS
    )


def test_what_two_ranks_saved_goes_on_alone(monkeypatch):
    less = {"SAVED_BY": (1, 2, 1), "KINDS": "KD", "TILE": 16, "SEQUENCES": 2, "LENGTH": 20, "RECORDS": 30}
    for name, value in less.items():
        monkeypatch.setattr(reshard, name, value)
    (record,) = reshard.judge([(1, 1, 1)])
    assert len(record["detail"]["losses never stopped"]) == reshard.STEPS
    assert len(record["detail"]["losses"]) == reshard.STEPS - reshard.SAVED_AT
    assert record["pass"] and record["measured"] <= reshard.LIMIT


def test_another_loss_after_resuming_falls_short():
    assert not reshard._record((1, 2, 1), [1.0, 1.0 + 1e-9], [1.0, 1.0])["pass"]
    assert not reshard._record((1, 2, 1), [1.0], [1.0, 1.0])["pass"]
