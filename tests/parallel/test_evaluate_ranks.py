"""Evaluation on ranks that share documents, weights and experts: the series of one process."""

import pytest
import torch

from longstrand.bench._small_models import architecture, documents, model
from longstrand.data import Pack
from longstrand.errors import CheckFailed, RunFailed
from longstrand.evaluate import evaluate_series, run_evaluation
from longstrand.model import load_model, save_model
from longstrand.model.parallelize import parallelize
from longstrand.parallel import make_mesh, run_ranks

EDGES = [0, 4, 16, 64]
MESHES = {
    "context 3": (1, 3, 1),
    "data 2, expert 2": (2, 1, 2),
    "data 2, context 2, expert 4": (2, 2, 4),
}
CASES = {
    "one document more on the first rank": (33, 1, 40, 9, 17),
    "a rank without a document": (21,),
    "no document at all": (),
}


def packs(lengths):
    return [Pack.from_documents([document]) for document in documents(lengths, seed=4)]


def scored_on_ranks(axes):
    data, context, expert = axes
    mesh = make_mesh(data=data, context=context, expert=expert)
    trained = parallelize(model(n_routed_experts=8), mesh, receive=8)
    return [
        evaluate_series(
            trained, packs(lengths)[mesh.data.rank :: mesh.data.size], EDGES, 5, "before", 0, mesh
        )
        for lengths in CASES.values()
    ]


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_every_rank_has_the_series_of_one_process(axes):
    alone = model(n_routed_experts=8)
    expected = [evaluate_series(alone, packs(lengths), EDGES, 5, "before", 0) for lengths in CASES.values()]
    for found in run_ranks(axes[0] * axes[1], scored_on_ranks, axes, start="fork", timeout=100):
        for series, truth in zip(found, expected, strict=True):
            assert_same(series, truth)


def scored_with_a_fault():
    mesh = make_mesh(data=1, context=2, expert=1)
    trained = parallelize(model(n_routed_experts=8), mesh, receive=8)
    if mesh.world.rank == 1:

        def failing(*_):
            raise RuntimeError("can't allocate memory")

        trained.layers[1].meet = failing
    evaluate_series(trained, packs((33,)), EDGES, 5, "before", 0, mesh)


def test_one_rank_without_memory_in_a_pass_ends_all():
    with pytest.raises(RunFailed, match=r"rank 1 of 2 failed:\n(?s:.*)can't allocate memory"):
        run_ranks(2, scored_with_a_fault, start="fork", timeout=30)


class Unsure:
    def token_logprobs(self, pack, levers):
        return torch.full((len(pack),), float("nan") if len(pack) == 9 else -1.0)


def refused_on_ranks():
    mesh = make_mesh(data=2, context=1, expert=1)
    try:
        evaluate_series(Unsure(), packs((5, 9))[mesh.data.rank :: 2], EDGES, 5, "before", 0, mesh)
    except CheckFailed as refused:
        return str(refused), refused.said_by_another
    return "went on", None


def test_what_one_rank_refuses_all_refuse_and_that_one_says():
    (words, first), (same, second) = run_ranks(2, refused_on_ranks, start="fork", timeout=30)
    assert words == same
    assert words.startswith(
        "evaluation: 8 log-probabilities are not finite, the first in document 1 at token 0;"
    )
    assert (first, second) == (True, False)


def assert_same(found, truth):
    """Numbers to rounding, everything else exactly."""
    if isinstance(truth, dict):
        assert found.keys() == truth.keys()
        for key, value in truth.items():
            assert_same(found[key], value)
    elif isinstance(truth, list | tuple):
        assert len(found) == len(truth)
        for one, other in zip(found, truth, strict=True):
            assert_same(one, other)
    elif isinstance(truth, float):
        assert found == pytest.approx(truth, abs=1e-10)
    else:
        assert found == truth


def command_on_a_rank(folder, data, axes):
    return run_evaluation(folder, [str(data)], 16, as_json=True, **axes)


@pytest.mark.parametrize("axes", [{"context": 2}, {"expert": 2}], ids=str)
def test_the_command_scores_as_one_process_does(tmp_path, axes, capfd):
    folder = save_model(load_model(architecture("KD", vocab_size=256), dtype=torch.float64), tmp_path / "m")
    data = tmp_path / "x.fa"
    data.write_text(">a\nACGTTGCAACGTAC\n>b\nGATTACA\n>c\nACGTACGTAA\n")
    expected = run_evaluation(folder, [str(data)], 16, as_json=True)
    capfd.readouterr()
    found = run_ranks(2, command_on_a_rank, folder, data, axes, start="fork", timeout=60)
    assert capfd.readouterr().out.count('"unit": "nats"') == 1
    for series in found:
        assert series["tokens"] == expected["tokens"] == 28
        assert series["nats"] == pytest.approx(expected["nats"], abs=1e-5)
        assert [bucket["tokens"] for bucket in series["buckets"]] == [
            b["tokens"] for b in expected["buckets"]
        ]
