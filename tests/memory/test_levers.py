"""Levers change where and when, never what: results with a lever on are those with it off, bit by bit."""

from functools import cache

import pytest
import torch
from copies import LastMinute, PlainCopies

from longstrand.bench._small_models import MODES, documents, losses, model, train_only
from longstrand.data.pack import Pack
from longstrand.memory import Levers, walk
from longstrand.memory.host import HostSlots, host_block
from longstrand.memory.levers import kept_inputs, streams_at_once
from longstrand.memory.slots import WRITES, SlottedStreams
from longstrand.memory.streams import DeviceStreams
from longstrand.model.dsa import Dsa

LENGTHS = (1, 17, 4, 20)
KINDS = "KDDKD"  # DD: the second shares the first one's pools
TILE = 16


def outcome(trained, mode, levers, aux_scale=None):
    """Log-probabilities, every gradient, the side losses and the experts' counts of one pass."""
    given = Pack.from_documents(documents(LENGTHS))
    side = losses(given, mode)
    side.aux_scale = side.aux_scale if aux_scale is None else aux_scale
    trained.zero_grad(set_to_none=True)
    logprobs = trained.token_logprobs(given, side=side, levers=levers)
    weight = torch.randn(len(given), generator=torch.Generator().manual_seed(3))
    (logprobs * weight.to(logprobs.dtype)).sum().backward()
    found = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    trained.zero_grad(set_to_none=True)
    sums = {"kl": torch.tensor(side.indexer_kl), "aux": torch.tensor(side.aux)}
    counts = {f"experts of layer {layer}": count for layer, count in side.expert_counts.items()}
    return {"log-probabilities": logprobs.detach()} | found | sums | counts


def trained_in(mode, dtype=torch.float64):
    return train_only(model(KINDS, dtype=dtype), *(["indexer"] if mode == "warmup" else []))


@cache
def without_levers(mode, tile=TILE, dtype=torch.float64):
    return outcome(trained_in(mode, dtype), mode, Levers(tile))


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_every", [2, 3])
def test_layers_run_again_give_the_inputs_they_gave_before(mode, keep_every):
    assert_same(outcome(trained_in(mode), mode, Levers(TILE, keep_every)), without_levers(mode))


@pytest.mark.parametrize("mode", ["frozen", "sparse"])
@pytest.mark.parametrize("train", ["all", "upper layers"])
def test_graphs_that_are_kept_give_what_recomputed_ones_give(mode, train):
    trained = trained_in(mode)
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(train == "all" or name.startswith(("layers.1", "layers.3", "lm_head")))
    wanted = outcome(trained, mode, Levers(TILE), aux_scale=0.0)
    assert_same(outcome(trained, mode, Levers(TILE, recompute=False), aux_scale=0.0), wanted)


def test_kept_graphs_are_refused_where_the_counts_of_a_whole_pass_come_first():
    for mode, aux_scale in (("warmup", 0.0), ("frozen", 0.3)):
        with pytest.raises(ValueError, match="need the counts of a whole pass first"):
            outcome(trained_in(mode), mode, Levers(TILE, recompute=False), aux_scale)
    with pytest.raises(ValueError, match="keep_every and offload would save nothing"):
        Levers(TILE, keep_every=2, recompute=False)


@pytest.mark.parametrize("mode", MODES)
def test_streams_in_a_file_are_what_they_are_in_memory(mode, tmp_path):
    levers = Levers(TILE, offload="disk", spool=str(tmp_path))
    assert_same(outcome(trained_in(mode), mode, levers), without_levers(mode))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [7, 100])
def test_tiles_that_fill_no_page_come_back_whole_in_every_dtype(tile, dtype, tmp_path):
    levers = Levers(tile, 2, "disk", str(tmp_path))
    assert_same(outcome(trained_in("sparse", dtype), "sparse", levers), without_levers("sparse", tile, dtype))


@pytest.fixture
def in_host_memory(monkeypatch):
    """Streams in host slots with copies of the test's choice, as on a device with memory of its own."""

    opened = []

    def use(copies):
        def open_streams(levers, demand, like):
            opened.append(HostSlots(host_block(demand.num_bytes), copies))
            return SlottedStreams(opened[-1], demand)

        monkeypatch.setattr(walk, "open_streams", open_streams)

    yield use
    assert opened and all(slots._block is None for slots in opened)  # given back after each pass


@pytest.mark.parametrize("mode", MODES)
def test_streams_in_host_slots_are_what_they_are_on_the_device(mode, in_host_memory):
    in_host_memory(PlainCopies())
    assert_same(outcome(trained_in(mode), mode, Levers(TILE)), without_levers(mode))


@pytest.mark.parametrize("late_loads", [False, True])
@pytest.mark.parametrize("keep_every", [1, 2])
def test_no_slot_is_read_early_and_no_tile_on_its_way_is_written_to_however_late_the_copies_are(
    late_loads, keep_every, in_host_memory
):
    copies = LastMinute(late_loads)
    in_host_memory(copies)
    assert_same(
        outcome(trained_in("sparse"), "sparse", Levers(5, keep_every)), without_levers("sparse", tile=5)
    )
    assert 0 < copies.most <= 2 * WRITES  # a stream and the last mean


def test_groups_of_layers_are_counted_from_the_lowest_that_trains():
    trained = trained_in("frozen")
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(name.startswith(("layers.1.mlp", "layers.4", "lm_head")))
    wanted = outcome(trained, "frozen", Levers(TILE))
    assert_same(outcome(trained, "frozen", Levers(TILE, 2)), wanted)


def test_a_layer_that_runs_again_neither_selects_nor_counts_again(monkeypatch):
    trained, selected = trained_in("frozen"), []
    plain = Dsa.select

    def select(self, h, q_resid, tile, carry):
        selected.append(tile.start)
        return plain(self, h, q_resid, tile, carry)

    monkeypatch.setattr(Dsa, "select", select)
    found = outcome(trained, "frozen", Levers(TILE, 2))
    num_tiles, selecting, active = -(-sum(LENGTHS) // TILE), 2, 2
    assert len(selected) == num_tiles * selecting
    assert all(int(found[f"experts of layer {i}"].sum()) == active * sum(LENGTHS) for i in range(1, 5))


class Counted(DeviceStreams):
    """Counts the streams that live at once, by the shape of their rows."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.live, self.most = {}, {}

    def new(self, *row):
        stream = super().new(*row)
        self.live[row] = self.live.get(row, 0) + 1
        self.most[row] = max(self.live[row], self.most.get(row, 0))
        free = stream.free

        def count():
            free()
            self.live[row] -= 1

        stream.free = count
        return stream


@pytest.mark.parametrize("keep_every", [1, 2, 3, 4])
@pytest.mark.parametrize("train", ["all", "upper layers", "head"])
def test_a_pass_has_as_many_streams_at_once_as_the_expression_says(keep_every, train, monkeypatch):
    stores, demands = [], []

    def open_streams(levers, demand, like):
        stores.append(Counted(demand.num_tokens, like))
        demands.append(demand)
        return stores[-1]

    monkeypatch.setattr(walk, "open_streams", open_streams)
    trained = model("KKKKKK")
    prefixes = {"all": "", "upper layers": ("layers.2", "layers.4"), "head": "lm_head"}[train]
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    given = Pack.from_documents(documents((20,)))
    trained.token_logprobs(given, levers=Levers(8, keep_every)).sum().backward()
    first = {"all": 0, "upper layers": 2, "head": 6}[train]
    assert stores[0].most == demands[0].rows == {(4, 16): streams_at_once(6, first, keep_every), (16,): 1}


def test_what_is_kept_is_every_kth_input_and_the_last_group():
    assert kept_inputs(8, 0, 1) == {1, 2, 3, 4, 5, 6, 7}
    assert kept_inputs(8, 0, 3) == {3, 6, 7}
    assert kept_inputs(8, 2, 3) == {2, 5, 6, 7}
    assert kept_inputs(8, 8, 3) == set()
    assert [streams_at_once(45, 0, k) for k in (1, 2, 7, 45)] == [44, 23, 12, 44]


def test_a_pass_that_only_scores_has_no_stream_and_writes_no_file(tmp_path):
    given = Pack.from_documents(documents(LENGTHS))
    with torch.no_grad():
        levers = Levers(TILE, 2, "disk", str(tmp_path / "spool"))
        found = trained_in("frozen").token_logprobs(given, levers=levers)
    assert torch.equal(found, without_levers("frozen")["log-probabilities"])
    assert [*tmp_path.iterdir()] == []
