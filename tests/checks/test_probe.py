"""What a probe counts, against a loop over tokens; what it says, writes and refuses."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from called import caller

from longstrand.bench._recount import kept_choices, recount
from longstrand.bench._small_models import documents, model
from longstrand.bench.caught import small_recipe
from longstrand.checks import probe as probing
from longstrand.checks.distance import PoolDistances
from longstrand.checks.probe import Asked, probe, run_probe
from longstrand.checks.probe_text import show
from longstrand.checks.probed import Probe, Subject
from longstrand.checks.skew import ExpertLoads, LayerLoads, busiest_over_mean, num_rounds, sizes_of_axis
from longstrand.config import dump_toml, load_recipe
from longstrand.data import Pack
from longstrand.errors import CheckFailed, UserError
from longstrand.export import export_run
from longstrand.memory.tiles import PackLayout
from longstrand.train.sft import train

RANKS = 3


def subject(packs, tile, ranks=RANKS, receive=4096, drawn=False):
    return Subject(
        "small", 1, "float64", "none", drawn, tile, list(map(len, packs)), None, "A", 0, ranks, receive
    )


def probed(given, packs, tile, **settings):
    """Both kinds of sequences are the same ones."""
    about = subject(packs, tile, **settings)
    found = probing.through(given, packs, "real", about)
    return Probe(about, given.architecture, found, found)


def buckets_of(distances, edges):
    """Sums of a mapping from distances, by bucket."""
    return [sum(n for back, n in distances.items() if start <= back < end) for start, end in pairwise(edges)]


@pytest.mark.parametrize(
    ("lengths", "tile"),
    [
        (((1, 2, 3, 33, 64, 65, 5), (17,)), 16),
        (((50,), (49, 3)), 7),
        (((31, 4, 5, 8),), 1000),
        (((3,), (2, 1)), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", ["KDDK", "DKD"])
def test_every_count_is_that_of_a_loop_over_tokens(lengths, tile, kinds):
    """Documents shorter than a pool, odd tiles, a layer that shares the pools of the one below."""
    given = model(kinds)
    packs = [Pack.from_documents(documents(each, seed=at)) for at, each in enumerate(lengths)]
    found = probed(given, packs, tile).real
    counted = recount(given.architecture, packs, kept_choices(given, packs, tile), tile, RANKS)
    loads, distances = found.loads, found.distances
    assert {layer: of.counts.tolist() for layer, of in loads.layers.items()} == counted["experts"]
    for layer, of in loads.layers.items():
        assert of.ratios[RANKS] == list(map(float, counted["ratios"][layer]))
    assert loads.data_skew(RANKS) == max(float(max(ratios)) for ratios in counted["ratios"].values())
    topk = given.architecture.index_topk
    assert distances.layers.keys() == counted["pools"].keys()
    for layer, of in distances.layers.items():
        back, even = counted["pools"][layer], counted["uniform"][layer]
        assert of.selected.tolist() == buckets_of(back, distances.edges)
        assert sum(of.selected.tolist()) == sum(back.values())
        assert of.beyond == sum(n for distance, n in back.items() if distance >= topk)
        uniform = list(map(float, buckets_of(even, distances.edges)))
        assert of.uniform.tolist() == pytest.approx(uniform, abs=1e-9)
        beyond = float(sum(n for distance, n in even.items() if distance >= topk))
        assert of.uniform_beyond == pytest.approx(beyond, abs=1e-9)
        assert of.queries == sum(map(len, packs))


def test_the_loss_is_that_of_the_targets_with_a_weight():
    given = model("KD")
    tokens = documents((20, 9))
    weights = [torch.ones(20), torch.cat([torch.ones(4), torch.zeros(5)])]
    pack = Pack.from_documents(tokens, weights)
    with torch.no_grad():
        nats = -(given.token_logprobs(pack) * pack.weight).sum() / pack.weight.sum()
    assert probed(given, [pack], 8).real.loss == pytest.approx(float(nats), abs=1e-12)


@pytest.mark.parametrize(("tokens", "rows"), [(16, 5), (9, 2**20)])
def test_distances_at_the_edges_of_pools_and_buckets(tokens, rows, monkeypatch):
    """Every visible pool is taken, in blocks of a few rows: shares are those of the uniform choice."""
    monkeypatch.setattr("longstrand.checks.distance.BLOCK", rows)
    tile = PackLayout(torch.tensor([0, 3, 3 + tokens]), 4, torch.device("cpu")).tile(0, 3 + tokens)
    found = PoolDistances(kpool=4, index_topk=8, longest=tokens)
    pools = torch.full((3 + tokens, 5), -1, dtype=torch.int32)
    for row in range(3, 3 + tokens):  # the first document has one pool, which it never completes
        for pool in range((row - 3 + 1) // 4):
            pools[row, pool] = 1 + pool
    found.add(2, tile, pools)
    of = found.layers[2]
    backs = [offset - (4 * pool + 3) for offset in range(tokens) for pool in range((offset + 1) // 4)]
    assert found.edges == [0, 4, 8, 16]
    assert of.selected.tolist() == [sum(a <= b < e for b in backs) for a, e in ((0, 4), (4, 8), (8, 16))]
    assert of.uniform.tolist() == of.selected.tolist()
    assert (of.beyond, of.uniform_beyond) == (sum(back >= 8 for back in backs),) * 2
    assert of.choosing == 0


def test_a_choice_of_the_nearest_pools_stands_in_front_of_the_uniform_one():
    """Two of four visible pools, at a query 3 tokens after the last one's end: 3 and 7 back, not 11 and 15."""
    tile = PackLayout(torch.tensor([0, 19]), 4, torch.device("cpu")).tile(18, 19)
    found = PoolDistances(kpool=4, index_topk=8, longest=19)
    found.add(0, tile, torch.tensor([[2, 3]], dtype=torch.int32))
    of = found.over_all()
    assert found.edges == [0, 4, 8, 16, 32]
    assert of.selected.tolist() == [1, 1, 0, 0] and of.uniform.tolist() == [0.5, 0.5, 1.0, 0.0]
    assert (of.beyond, of.uniform_beyond, of.choosing, of.queries) == (0, 1.0, 1, 1)


def test_all_tokens_to_the_same_experts_give_exactly_experts_over_active():
    loads = ExpertLoads(12, 2, sizes_of_axis(12, 3), 3, receive=20, longest=10)
    for tokens in (10, 10, 4):  # the last one is too short to be a tile
        loads.add(5, torch.tensor([[4, 7]], dtype=torch.uint8).expand(tokens, -1))
    of = loads.layers[5]
    assert loads.ranks == (2, 3, 4, 12) and of.counts.tolist() == [0] * 4 + [24, 0, 0, 24] + [0] * 4
    assert of.ratios == {2: [1.0] * 2, 3: [3.0] * 2, 4: [2.0] * 2, 12: [12 / 2] * 2}
    assert [loads.data_skew(n) for n in (1, 2, 3, 12)] == [1.0, 1.0, 3.0, 6.0]
    assert of.collapsed(2) and not of.collapsed(12)
    # 3 ranks send the one rank 20 pairs each, and it receives 20 in a round; each cell of a round holds at most 6.
    assert of.rounds == [num_rounds(np.array([0] * 4 + [10, 0, 0, 10] + [0] * 4), 3, 20)] * 2
    assert loads.rounds()["most"] == of.rounds[0] >= 3


@pytest.mark.parametrize(
    ("counts", "ranks", "receive", "rounds"), [([8, 0], 2, 8, 2), ([4, 4], 2, 8, 1), ([4, 4], 2, 4, 2)]
)
def test_rounds_are_those_of_ranks_that_all_choose_alike(counts, ranks, receive, rounds):
    assert num_rounds(np.array(counts), ranks, receive) == rounds


def test_an_even_router_has_no_skew_and_no_collapse():
    even = LayerLoads(np.full(8, 50), {})
    assert even.step(8) == even.step(2) == 1.0 and not even.collapsed(2)
    nearly = LayerLoads(np.array([500, 498, 0, 2]), {})
    assert nearly.collapsed(2) and not LayerLoads(np.array([500, 450, 50, 0]), {}).collapsed(2)
    assert busiest_over_mean(np.array([3, 1, 0, 0]), 2) == 2.0


@pytest.mark.parametrize(
    ("experts", "spread", "sizes"),
    [(288, 32, [2, 4, 8, 16, 32, 288]), (6, 3, [2, 3, 6]), (7, 1, [7]), (8, 1, [2, 4, 8])],
)
def test_the_sizes_of_the_expert_axis(experts, spread, sizes):
    assert sizes_of_axis(experts, spread) == sizes


def test_one_expert_of_every_token_is_named():
    of = LayerLoads(np.array([300, 150, 100, 50]), {})
    assert of.always_chosen(2) and not of.collapsed(2)
    assert not of.always_chosen(4) and not LayerLoads(np.array([290, 160, 100, 50]), {}).always_chosen(2)
    loads = ExpertLoads(4, 2, [4], 1, receive=8, longest=5)
    loads.add(7, torch.tensor([[2, 0], [2, 1], [3, 2], [2, 0], [1, 2]]))
    found = probed(model("KD"), [Pack.from_documents(documents((20,)))], 16)
    one = replace(found, real=replace(found.real, loads=loads))
    assert any("in layer 7 one expert is chosen by (nearly) every token" in line for line in one.warnings())


def collapse(given):
    """Every token's scores differ by the correction bias alone."""
    with torch.no_grad():
        for name, value in given.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.arange(len(value)) * 10.0)
    return given


def test_a_collapsed_router_is_named_and_a_healthy_one_is_not():
    packs = [Pack.from_documents(documents((70,)))]
    collapsed = probed(collapse(model("KDK")), packs, 16)
    assert any("router of layers 1, 2 sends (nearly) all" in line for line in collapsed.warnings())
    assert collapsed.real.loads.data_skew(6) == 3.0  # 6 experts, 2 of them busy
    assert probed(model("KDK"), packs, 16).warnings() == []


def test_warnings_of_what_is_short_or_drawn():
    packs = [Pack.from_documents(documents((11,)))]
    found = probed(model("KDK"), packs, 16, drawn=True).warnings()
    assert "the weights are drawn" in found[0]
    assert "fewer than one tile of 16" in found[-2] and "no query sees more pools than the 3" in found[-1]


def test_a_model_without_a_part_leaves_it_out(capsys):
    from rich.console import Console

    packs = [Pack.from_documents(documents((40,)))]
    no_pools = probed(model("KK"), packs, 16).as_dict()
    assert (
        no_pools["pools"] is None
        and no_pools["experts"] is not None
        and "sparse-attention" in no_pools["left_out"][0]
    )
    dense = model("KD", mlp_layer_types=["dense", "dense"])
    found = probed(dense, packs, 16, ranks=1)
    assert found.data_skew is None and found.as_dict()["data_skew"] is found.as_dict()["experts"] is None
    show(found, Console(width=100))
    assert "Left out: expert load and data_skew: this model has no routed experts." in capsys.readouterr().out


def test_a_log_probability_that_is_not_finite_stops_it():
    broken = model("KD")
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    with pytest.raises(CheckFailed, match="real sequence 1 are not finite"):
        probed(broken, [Pack.from_documents(documents((9,)))], 4)


@pytest.fixture
def call(monkeypatch, capsys):
    """The command line in this process: code, standard output and standard error."""
    return caller(monkeypatch, capsys, "probe")


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(dump_toml(small_recipe(tmp_path)))
    return path


@pytest.mark.parametrize("kernels", ["portable", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_shows_writes_and_prints_the_same(call, recipe_file, tmp_path, dtype, kernels):
    sets = ["--set", f"run.dtype={dtype}", "--set", f"kernels.cpu={kernels}"]
    before = {path.name for path in tmp_path.iterdir()}
    code, shown, _ = call(recipe_file, *sets)
    assert code == 0 and max(map(len, shown.splitlines())) <= 100
    assert {path.name for path in tmp_path.iterdir()} == before | {"cache"}  # nothing is written
    assert "data_skew = " in shown and "weights are drawn" in shown and "A, C, G and T" in shown
    code, printed, _ = call(recipe_file, *sets, "--json", "--out", tmp_path / "probe.json")
    found = json.loads(printed)
    assert code == 0 and json.loads((tmp_path / "probe.json").read_text()) == found
    assert set(found) == {
        "version",
        "subject",
        "loss_nats",
        "experts",
        "pools",
        "data_skew",
        "left_out",
        "warnings",
    }
    assert found["subject"]["expert_ranks"] == 2 and found["experts"]["ranks"] == [2, 4, 8]
    pairs = 2 * sum(found["subject"]["lengths"])
    for layer in found["experts"]["layers"]:
        assert sum(layer["real"]["tokens_per_expert"]) == sum(layer["random"]["tokens_per_expert"]) == pairs
        assert layer["real"]["busiest_over_mean"]["2"]["largest_tile"] <= found["data_skew"]["data_skew"]
    for layer in [*found["pools"]["layers"], found["pools"]["all"]]:
        for kind in ("real", "random"):
            assert sum(bucket["share"] for bucket in layer[kind]["buckets"]) == pytest.approx(1)
            assert sum(bucket["uniform"] for bucket in layer[kind]["buckets"]) == pytest.approx(1)
    skew, largest = found["data_skew"], found["experts"]["largest"]
    assert skew["data_skew"] == largest["real"]["2"]["largest_tile"]
    assert skew["random"] == largest["random"]["2"]["largest_tile"]
    assert skew["at_most_with_any_ranks"] == largest["real"]["8"]["largest_tile"] >= skew["data_skew"]
    assert skew["rounds_per_tile"]["receive"] == 64


def test_one_expert_rank_has_no_skew_but_an_upper_bound(call, recipe_file):
    code, shown, _ = call(recipe_file, "--expert-ranks", 1, "--tokens", 90)
    assert code == 0 and "data_skew = 1: the one expert rank receives everything" in shown
    assert "cut to 90 at the most (--tokens)" in shown and "most   2 ranks" in shown
    skew = json.loads(call(recipe_file, "--expert-ranks", 1, "--json")[1])["data_skew"]
    assert skew["data_skew"] == skew["random"] == 1.0 and skew["rounds_per_tile"] is None
    assert skew["at_most_with_any_ranks"] > 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sequences", "50"], "--sequences 50: the recipe's data has "),
        (["--sequences", "0"], "--sequences"),
        (["--tokens", "1"], "--tokens 1: must be at least 2"),
        (["--tokens", "many"], "--tokens many: must be a whole number of tokens"),
        (["--tokens", "4k"], "--tokens 4096: the longest of these sequences has 1"),
        (["--expert-ranks", "3"], "--expert-ranks 3: must divide the model's 8 routed experts"),
        (
            ["--set", "parallel.receive=2", "--expert-ranks", "4"],
            "--expert-ranks 4: each of them sends a row at least, and parallel.receive = 2 takes fewer at once; raise",
        ),
        (
            ["--set", "memory.tile=1", "--expert-ranks", "8"],
            "and parallel.receive = 4 (it is not set, and 4 x memory.tile = 1) takes fewer at once; raise it to 8",
        ),
        (["--out", "r.toml"], "--out r.toml: exists, and is never overwritten"),
        (["--out", "no/where.json"], "--out no/where.json: its folder does not exist"),
        (["--set", "model.config=nothing"], "model.config = nothing: no such file"),
    ],
    ids=str,
)
def test_what_cannot_be_probed_is_one_line_and_code_2(
    call, recipe_file, options, says, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(recipe_file, *options)
    assert (code, out) == (2, "") and says in err and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and not (tmp_path / "no").exists()


def test_too_few_sequences_are_counted(tmp_path):
    """What a recipe has before one repeats is what is said, and as many can be probed."""
    recipe = small_recipe(tmp_path)
    with pytest.raises(UserError, match=r"has ([0-9]+) different sequences") as refused:
        probe(recipe, Asked(sequences=30))
    there = int(str(refused.value).split("has ")[1].split()[0])
    found = probe(recipe, Asked(sequences=there))
    assert len(found.subject.lengths) == there
    records = [line for line in (tmp_path / "some.fa").read_text().splitlines() if line[0] != ">"]
    assert sum(found.subject.lengths) == sum(map(len, records))


def test_the_newest_checkpoint_of_the_recipes_run_is_probed(tmp_path):
    recipe = small_recipe(tmp_path)
    recipe = recipe.model_copy(update={"parallel": type(recipe.parallel)()})
    assert probe(recipe, Asked()).subject.drawn
    run = train(recipe)
    trained = probe(load_recipe(run / "run.toml"), Asked())
    assert trained.subject.weights == f"step 4 of {run}" and not trained.subject.drawn
    elsewhere = recipe.model_copy(
        update={"run": recipe.run.model_copy(update={"out": str(tmp_path / "other")})}
    )
    drawn = probe(elsewhere, Asked())
    assert drawn.subject.drawn and drawn.real.loss > trained.real.loss
    export_run(run, tmp_path / "weights")
    given = type(recipe.model)(path=str(tmp_path / "weights"))
    loaded = probe(elsewhere.model_copy(update={"model": given}), Asked())
    assert loaded.subject.weights == f"of {tmp_path / 'weights'}"
    assert loaded.real.loss == pytest.approx(trained.real.loss, rel=1e-6)


def test_the_command_writes_nothing_over_what_appeared_meanwhile(tmp_path, monkeypatch):
    out = tmp_path / "probe.json"
    monkeypatch.setattr(probing, "show", lambda *_: out.write_text("mine"))
    with pytest.raises(UserError, match="exists by now"):
        run_probe(small_recipe(tmp_path), Asked(), out=out)
    assert out.read_text() == "mine"
