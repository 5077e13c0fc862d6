"""A certificate of a small recipe on two ranks: it passes, and fails for each of several faults where that fault is."""

import json
import math

import pytest
import torch

from longstrand.bench import _faults as faults
from longstrand.bench.caught import FAULTS, TOKENS, certified, small_recipe
from longstrand.checks.certify import certify, run_certification
from longstrand.checks.comparing import Names, compare
from longstrand.checks.sample import alone, draw_packs, num_tokens, packs_of
from longstrand.checks.watching import Found
from longstrand.config import dump_toml
from longstrand.data import open_data
from longstrand.errors import CheckFailed, UserError
from longstrand.train.run_folder import check_unused

QUICK = (  # those that a rank alone shows; all of them are the figure `caught`
    "state gradients not scanned",
    "a mean of means",
    "experts' gradients times ranks",
    "a layer not reduced",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The certificate of the product as it is."""
    folder = tmp_path_factory.mktemp("certified")
    return certified(folder), folder


def test_the_product_passes_every_check(plain):
    found = plain[0]
    assert [(each.name, each.settings, each.difference) for each in found.checks if not each.passed] == []
    assert [each.name for each in found.checks] == (
        ["ranks"] * 2 + ["packs"] + ["tiles"] * 3 + ["levers"] * 6 + ["resume"] * 3
    )
    assert 100 < found.tokens <= TOKENS
    assert "float64" in found.subject and "more than one rank of data" in found.not_checked


def test_levers_and_a_resumed_run_give_the_same_bits(plain):
    exact = [each for each in plain[0].checks if each.limit == 0]
    assert {each.settings for each in exact} == {
        *(f"{lever}, {dtype}" for lever in ("keep_every = 2", "offload = disk") for dtype in ("float64", "float32")),
        "save, load, next step",
    }  # fmt: skip
    assert {each.difference.gradient for each in exact} == {0.0}


def test_nothing_but_the_certificate_stays_in_the_folder(plain):
    found, folder = plain
    run = folder / "run"
    assert list(run.iterdir()) == []
    found.write(run)
    assert not check_unused(run, resume=False)  # train takes it


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_of_many_ranks_is_caught_where_it_is(name, tmp_path):
    fault = FAULTS[name]
    found = certified(tmp_path, fault, only=(fault.check,))
    assert [each.difference.where for each in found.checks] == [fault.where] * 2


def test_choices_made_again_show_where_nothing_is_recomputed(tmp_path):
    fault = FAULTS["experts chosen again"]
    found = certified(tmp_path, fault, only=("levers",))
    assert [each.difference.where for each in found.checks if not each.passed] == [fault.where]


def test_a_certificate_that_fails_ends_with_code_3_and_says_where(tmp_path):
    with faults.states_not_scanned(), pytest.raises(CheckFailed) as refused:
        run_certification(small_recipe(tmp_path), tokens=TOKENS, start="fork", only=("ranks",))
    assert refused.value.exit_code == 3
    assert str(refused.value).startswith(
        "ranks (context 2 x expert 2) differs: layer 0 (KDA), forward; 2 of 2 checks failed; "
    )
    written = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert not written["passed"]
    assert written["checks"][0]["where"] == "layer 0 (KDA), forward"


def test_a_folder_that_holds_a_run_is_certified_and_another_one_refused(tmp_path, capsys):
    recipe, run = small_recipe(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text(dump_toml(recipe))
    run_certification(recipe, tokens=TOKENS, start="fork", only=("tiles",))
    assert {path.name for path in run.iterdir()} == {"run.toml", "certificate.json"}
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    (run / "run.toml").rename(run / "my.toml")
    with pytest.raises(UserError, match=r"is not a run's folder \(it holds my.toml"):
        certify(recipe, tokens=TOKENS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 10}, "--tokens 10: must be at least 64"),
        ({"parallel": {"context": 2, "expert": 3}}, "parallel.expert = 3: must divide the number of proc"),
        ({"parallel": {"context": 3, "expert": 3}}, "parallel.expert = 3: must divide the model's 8 routed"),
        ({"parallel": {"data": 8, "context": 8}}, "certify starts 16 processes at most"),
        ({"ranks": 17}, "--ranks 17: certify starts 16 processes at most"),
    ],
)
def test_what_cannot_be_certified_is_refused(changes, says, tmp_path):
    recipe = small_recipe(tmp_path)
    if "parallel" in changes:
        axes = recipe.parallel.model_copy(update={"data": 1, "expert": 1} | changes.pop("parallel"))
        recipe = recipe.model_copy(update={"parallel": axes})
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        certify(recipe, **changes)


def test_packs_are_odd_real_and_of_several_documents(tmp_path):
    data = open_data(small_recipe(tmp_path).data)
    packs = draw_packs(data.train_loader(1), 200, 3)
    assert all(sum(map(len, pack)) % 2 for pack in packs) and num_tokens(packs) <= 200
    assert len(packs[1]) > 1
    lines = (tmp_path / "some.fa").read_text().splitlines()
    records = [tuple(line.encode()) for line in lines if line[0] != ">"]
    for document in (each for pack in packs for each in pack):
        assert any(document.tokens == record[: len(document)] for record in records)
        assert len(document.weights) == len(document)
    together, each = packs_of(packs), packs_of(alone(packs))
    assert torch.equal(torch.cat([p.targets for p in together]), torch.cat([p.targets for p in each]))
    assert torch.equal(torch.cat([p.weight for p in together]), torch.cat([p.weight for p in each]))


def test_what_is_no_number_or_absent_differs():
    values = torch.ones(3, 1, 2)
    names = Names(("KDA", "DSA"), {"layers.1.mlp.weight": "dense", "norm.weight": "norms"})
    truth = Found(
        {0: values, 1: values},
        {0: values, 1: values},
        torch.zeros(3),
        {name: torch.ones(2) for name in names.groups},
        {"loss": 1.0, "norm": 2.0},
        {},
    )
    assert compare(truth, truth, names, 0.0).where is None

    def where(**changes):
        return compare(Found(**vars(truth) | changes), truth, names, 1e-10).where

    assert where(outputs={0: values, 1: values * math.nan}) == "layer 1 (DSA), forward"
    assert where(outputs={1: values}) == "layer 0 (KDA), forward"
    assert where(logprobs=torch.tensor([0.0, 0.0, 1e-3])) == (
        "the log-probabilities: the head, the last norm or the targets"
    )
    assert where(values={"loss": math.nan, "norm": 2.0}) == "the loss"
    assert where(gradients={0: values * 2, 1: values}) == "layer 0 (KDA), backward"
    assert where(parameters=truth.parameters | {"norm.weight": torch.zeros(2)}) == "gradients of norms"
    assert where(values={"loss": 1.0}) == "the norm of the gradients"
