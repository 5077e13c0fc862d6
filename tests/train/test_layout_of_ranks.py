"""The layout of a recipe on its ranks, against plain arithmetic and against what ranks really hold and receive."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from longstrand.architecture import Architecture
from longstrand.bench._small_models import architecture, model, pack
from longstrand.config import ParallelSection, load_recipe
from longstrand.errors import UserError
from longstrand.memory import Levers
from longstrand.memory.shared_walk import SharedWalk
from longstrand.model.parallelize import parallelize
from longstrand.parallel import local_part, make_mesh, run_ranks
from longstrand.plan.host import Machine
from longstrand.plan.job import Job
from longstrand.plan.links import host_optimizer_work
from longstrand.plan.operations import memory_work
from longstrand.plan.passes import Passes
from longstrand.plan.sizes import Sizes
from longstrand.train.dry_run import check
from longstrand.train.layout import layout_of
from longstrand.train.planning import job_of
from longstrand.trained import model_source

NAME = "glm-5.3-flash_1m_64gpus"
GIB = 2**30
LENGTH, RANKS = 1_048_576, 64
OWN = LENGTH // RANKS
D, W, KDA, DSA, MOE = 4096, 154_880, 34, 11, 42


def published(*overrides):
    recipe = load_recipe(NAME, list(overrides))
    return layout_of(recipe, shape_of(recipe))


def shape_of(recipe):
    return Architecture.from_hf(json.loads(model_source(recipe.model).read_text()))


@pytest.fixture(scope="module")
def layout():
    return published()


def parameters():
    """Of the published model, layer kind by layer kind."""
    inner = 64 * 128
    kda = 4 * D * inner + 3 * inner * 4 + 2 * (D * 128 + 128 * inner) + D * 64 + 64 + inner + 128
    mla = D * 1536 + 1536 + 1536 * 64 * 256 + D * 512 + 512 + 512 * 64 * (256 + 256) + 64 * 256 * D
    indexer = 1536 * 32 * 128 + D * 128 + 2 * 128 + D * 32 + 4 * 128 + 128 * D
    around = 2 * (24 * 4 * D + 24 + 3) + 2 * D
    expert, dense = 3 * D * 2048, 3 * D * 12_288
    mixture = 288 * expert + expert + 288 * D
    whole = KDA * kda + DSA * (mla + indexer) + 45 * around + MOE * mixture + 3 * dense + 2 * W * D + D
    return whole, DSA * indexer


def test_the_published_model_has_its_313_billion_parameters(layout):
    whole, indexer = parameters()
    assert layout.num_parameters == whole == 313_326_799_870
    assert layout.num_trained == whole - indexer  # frozen
    assert (
        whole / 64 < layout.own_parameters < 1.15 * whole / 64
    )  # five of nine experts on the fuller replica


def test_tokens_and_experts_are_dealt_evenly(layout):
    assert set(layout.tokens) == {OWN}
    assert layout.deal.imbalance == 1
    assert (layout.experts, layout.expert_replicas) == (288 // 32, 2)


def of_phase(layout, phase):
    return {term.name: term.num_bytes for term in layout.memory.phases[phase]}


def elsewhere(layout, place):
    return {term.name: term.num_bytes for term in layout.memory.elsewhere if term.place == place}


def test_every_layer_input_of_a_million_tokens_takes_22_and_a_half_gib_per_rank(layout):
    assert elsewhere(layout, "host")["layer inputs"] == 45 * 4 * D * 2 * OWN == 22.5 * GIB
    assert elsewhere(layout, "host")["last mean"] == D * 2 * OWN


def test_bytes_are_those_of_plain_arithmetic(layout):
    forward, backward = of_phase(layout, "forward"), of_phase(layout, "backward")
    state, entered = 64 * 128 * 128 * 4, 3 * 3 * 64 * 128 * 2
    assert forward["embedding and head, gathered"] == (2 * W * D + D) * 2
    assert forward["moments"] == of_phase(layout, "optimizer")["moments"] == layout.own_trained * 8
    assert of_phase(layout, "optimizer")["gradients"] == layout.own_trained * 4
    assert backward["between a layer's two stages"] == (D * 2 + (4 + 16 + 64 * 128) * 4) * OWN
    # After the last layer; two segments of two tiles, and of 128 segments the maps of one head.
    job = job_of(load_recipe(NAME), shape_of(load_recipe(NAME)), torch.device("cuda"))
    sizes = Sizes(job)
    assert sum(map(sizes.choices, range(45))) == (DSA * 512 * 4 + MOE * 8 * 2) * OWN  # 22.7 KiB per token
    assert sum(map(sizes.border, range(45))) * sizes.num_tiles == KDA * (state + entered) * 4
    rows = 2 * 3 * 4 * D * 2
    assert sum(map(sizes.maps, range(45))) == KDA * (128 * 128 * 128 * 4 + 2 * (state + entered) + rows)
    dsa = next(index for index in range(45) if sizes.selects(index))
    assert sizes.buffers(dsa) == LENGTH * 512 * 2 + LENGTH // 4 * 128 * 2
    received = layout.received
    assert received["KDA: summaries and states", "forward"] == 24 * 2**20 * 63 // 64
    assert received["DSA: latents and pool keys", "forward"] == LENGTH * (1024 + 64) * 63 // 64
    assert received["MoE: tokens", "forward"] == OWN * 8 * 31 // 32 * D * 2 * 2


def test_an_optimizer_step_passes_over_what_the_cut_model_really_trains(layout):
    """In bfloat16, float32 weights are whole on each rank: on 64 ranks that is a tenth more than an even share."""
    job = job_of(load_recipe(NAME), shape_of(load_recipe(NAME)), torch.device("cuda"))
    found = next(work for work in memory_work(Passes(job)) if work.name == "optimizer")
    assert found.amount == layout.own_trained * (10 * 4 + 2)
    assert layout.own_trained > 1.05 * layout.num_trained / RANKS
    copies = host_optimizer_work(
        Passes(replace(job, memory=job.memory.model_copy(update={"optimizer": "host"})))
    )
    assert copies is not None and copies.amount == layout.own_trained * (4 + 2)


def test_levers_move_or_shrink_what_they_say():
    changed = published("memory.keep_every=7", "memory.optimizer=host", "memory.offload=none")
    assert max(of_phase(changed, phase).get("layer inputs", 0) for phase in ("forward", "backward")) <= (
        13 * 4 * D * 2 * OWN
    )
    assert "moments" not in of_phase(changed, "optimizer") and "fronts" not in of_phase(changed, "backward")
    assert sum(elsewhere(changed, "host").values()) == changed.own_trained * 16
    assert "fronts" in of_phase(published("memory.keep_fronts=true"), "backward")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.expert=64"], "must divide the model's 288 routed experts"),
        (["parallel.expert=24"], "must divide the number of processes, 64"),
        (["parallel.receive=16"], "must be at least parallel.expert = 32"),
        (["memory.keep_every=44"], "memory.keep_every = 44"),
        (["train.trainable=['vision']"], "vision"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_pretended_ranks(overrides, words):
    with pytest.raises(UserError, match=words):
        published(*overrides)
    assert not dist.is_initialized()


def small(tmp_path, **changes):
    config = tmp_path / "small.json"
    config.write_text(json.dumps(architecture("KDKD", n_routed_experts=8, **changes).to_hf()))
    overrides = [f"model.config={config}", "data.length=64", "run.dtype=float64", "evaluate.buckets=32"]
    axes = ["parallel.data=2", "parallel.context=2", "parallel.expert=2", "parallel.receive=16"]
    return load_recipe(NAME, [*overrides, *axes])


def held_by_a_rank():
    """Parameters of this rank, their bytes, and those that came while one sequence of 64 tokens was scored."""
    mesh = make_mesh(data=2, context=2, expert=2)
    trained = parallelize(model("KDKD", n_routed_experts=8), mesh, receive=16)
    parts = [local_part(parameter) for parameter in trained.parameters()]
    buffers = sum(buffer.nbytes for buffer in trained.buffers())
    own, held = sum(part.numel() for part in parts), sum(part.nbytes for part in parts) + buffers
    with torch.no_grad():
        trained.token_logprobs(pack((64,)), levers=Levers(tile=8))
    return own, held, dict(mesh.context.received)


def kept_by_a_rank():
    """Bytes that each KDA passage of this rank keeps when its walk back begins, and those that are planned."""
    trained = parallelize(model("KDK"), make_mesh(data=1, context=2, expert=1))
    ranks = ParallelSection(context=2)
    sizes = Sizes(Job(architecture("KDK"), 64, dtype="float64", parallel=ranks))
    found, backward = [], SharedWalk.backward

    def looked_at(walk, d_out):
        for index in (0, 2):
            passage = walk.passages[index]
            tensors = [passage._tails, passage._rows_before, passage._states, passage._scan._maps]
            assert not {"_d_own", "_d_tails"} & vars(passage).keys()  # made on the way back
            found.append((sum(each.nbytes for each in tensors), sizes.maps(index)))
        return backward(walk, d_out)

    SharedWalk.backward = looked_at
    trained.token_logprobs(pack((64,)), levers=Levers(tile=8)).sum().backward()
    return found


def test_passages_keep_what_is_counted():
    for found in run_ranks(2, kept_by_a_rank, start="fork", timeout=60):
        assert [kept == counted > 0 for kept, counted in found] == [True, True]


def test_a_spool_is_counted_in_its_slots():
    counted = published("memory.offload=disk", "memory.tile=1000")
    tiles, page = 2 * 9, 4096  # 8,192 tokens in tiles of at most 1,000
    slots = [-(-1000 * row * 2 // page) * page for row in (4 * D, D)]
    assert sum(elsewhere(counted, "file").values()) == tiles * (45 * slots[0] + slots[1])


def test_real_ranks_hold_and_receive_what_is_counted(tmp_path):
    recipe = small(tmp_path)
    shape = Architecture.from_hf(json.loads((tmp_path / "small.json").read_text()))
    ranks = run_ranks(4, held_by_a_rank, start="fork", timeout=100)
    planned = of_phase(layout_of(recipe, shape), "start")["weights"]
    assert planned == max(held for _, held, _ in ranks)
    for rank, (own, _, received) in enumerate(ranks):
        counted = layout_of(recipe, shape, rank)
        assert counted.own_parameters == own
        kda, dsa = (
            counted.received[what, "forward"]
            for what in ("KDA: summaries and states", "DSA: latents and pool keys")
        )
        assert 2 * kda == received["KDA summaries"] + received["KDA states"]
        assert 2 * dsa == received["DSA latents"] + received["DSA pool keys"]


def test_a_dry_run_without_data_says_what_was_not_checked(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    check(load_recipe(NAME))
    said = " ".join(capfd.readouterr().err.split())
    assert "layer inputs │ 22.50" in said
    assert "not checked: the data, since" in said and "hg38.fa.gz is not here" in said
    assert "counted, not run" in said
    assert "counted as on a GPU; for another device: longstrand plan RECIPE --device NAME" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gib", "fits"), [(1, False), (4096, True)])
def test_a_dry_run_says_that_a_rank_has_no_room_here(tmp_path, monkeypatch, capfd, gib, fits):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "longstrand.train.dry_run.this_machine", lambda: Machine(gib * 2**30, "a small machine")
    )
    for changes, device in (([], "a GPU"), (["memory.offload=disk", "memory.optimizer=device"], "this CPU")):
        check(load_recipe(NAME, changes))
        said = " ".join(capfd.readouterr().err.split())
        assert f"counted as on {device}; for " in said
        assert ("a single rank would not fit this machine: it takes" in said) is not fits


def test_a_dry_run_checks_the_data_that_is_here(tmp_path, capfd):
    fasta = tmp_path / "x.fa"
    fasta.write_text(">chr1\n" + "ACGT" * 300 + "\n>chr22\n" + "GATTACA" * 200 + "\n")
    files = [f"data.sources.0.path={fasta}", f"evaluate.sources.0.path={fasta}", "data.length=64"]
    files += ["data.sources.0.regions=['chr1']", f"data.cache={tmp_path / 'cache'}", "evaluate.buckets=32"]
    check(load_recipe(NAME, files))
    assert "not checked" not in capfd.readouterr().err
    with pytest.raises(UserError, match="chr9"):
        check(load_recipe(NAME, [*files, "data.sources.0.regions=['chr9']"]))
