"""Generation on ranks that share prompts, weights and experts: the tokens of one process, and its log-probabilities."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from longstrand.bench._small_models import architecture, documents, model
from longstrand.errors import CheckFailed, UserError
from longstrand.generate import Sampling, generate
from longstrand.generate.command import Request, run_generation
from longstrand.model import load_model, save_model
from longstrand.model.decode import prefill
from longstrand.model.parallelize import parallelize
from longstrand.parallel import make_mesh, run_ranks

LENGTHS = (1, 2, 13, 33)
"""Shorter than three ranks, around pools of 4, and not divisible by the segments."""

SAMPLING = Sampling(seed=3, stop=(4, 9), allowed=(1, 2, 3, 4, 7, 9, 13))
MESHES = {  # data, context, expert
    "context 2": (1, 2, 1),
    "context 3": (1, 3, 1),
    "expert 2 over prompts": (2, 1, 2),
    "expert 2 over context": (1, 2, 2),
    "all": (2, 2, 4),
}
CASES = {  # prompts, samples, batch
    "samples that go on in the next batch": (LENGTHS, 2, 3),
    "one prompt": ((17,), 3, 2),
    "as many prompts as ranks": ((4, 1), 1, 8),
}


def on_mesh(axes, kinds="KDDK"):
    trained = model(kinds, n_routed_experts=8)
    data, context, expert = axes
    return parallelize(trained, make_mesh(data=data, context=context, expert=expert), receive=8)


def generated(trained):
    found = [
        generate(trained, documents(lengths, seed=2), 5, SAMPLING, num_samples=samples, batch=batch, tile=4)
        for lengths, samples, batch in CASES.values()
    ]
    return [[(each.tokens, each.logprobs, each.excluded, each.stopped) for each in case] for case in found]


def generated_on_ranks(axes):
    trained = on_mesh(axes)
    found = generated(trained)
    whole = [name for name, weight in trained.named_parameters() if not isinstance(weight, DTensor)]
    return found, whole


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_all_ranks_return_the_sequences_of_one_process(axes):
    expected = generated(model("KDDK", n_routed_experts=8))
    for found, whole in run_ranks(axes[0] * axes[1], generated_on_ranks, axes, start="fork", timeout=100):
        assert not whole, "weights that stayed gathered"
        for case, truth in zip(found, expected, strict=True):
            for (tokens, logprobs, excluded, stopped), other in zip(case, truth, strict=True):
                assert torch.equal(tokens, other[0])
                assert (logprobs - other[1]).abs().max() <= 1e-10
                assert abs(excluded - other[2]) <= 1e-10
                assert stopped == other[3]


def prefixes(trained):
    return [prefill(trained, prompt, tile=3) for prompt in documents((1, 2, 15, 16, 33), seed=4)]


def parts(prefix):
    """Everything that a prompt leaves, by name."""
    found = {"hidden": prefix.hidden}
    for number, carry in enumerate(prefix.carries):
        for name, value in vars(carry).items():
            if value is not None:
                found[f"layer {number}: {name}"] = value
    return found


def prefixes_on_ranks(axes):
    return [parts(prefix) for prefix in prefixes(on_mesh(axes, "DKDD"))]


@pytest.mark.parametrize("axes", [(1, 2, 1), (1, 3, 1), (1, 2, 2)], ids=str)
def test_every_rank_has_all_that_a_prompt_leaves(axes):
    expected = [parts(prefix) for prefix in prefixes(model("DKDD", n_routed_experts=8))]
    for found in run_ranks(axes[1], prefixes_on_ranks, axes, start="fork", timeout=100):
        for ours, truth in zip(found, expected, strict=True):
            assert ours.keys() == truth.keys()
            for name, value in truth.items():
                torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12, msg=name)


def written(folder, out, **axes):
    request = Request(
        texts=("ACGTTGCA", "AC", "GATTACA"), max_new_tokens=5, num_samples=2, tile=4, out=out, **axes
    )
    return run_generation(folder, request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(
        load_model(architecture("KD", vocab_size=256), dtype=torch.float64), tmp_path_factory.mktemp("model")
    )


@pytest.mark.parametrize("axes", [{"context": 2}, {"expert": 2}], ids=str)
def test_the_command_writes_the_file_of_one_process_once(folder, tmp_path, axes):
    written(folder, tmp_path / "one.fa")
    run_ranks(2, on_a_rank, folder, tmp_path / "ranks.fa", axes, start="fork", timeout=60)
    ranks, one = ((tmp_path / name).read_text().split("mean_logprob=") for name in ("ranks.fa", "one.fa"))
    for ours, truth in zip(ranks[1:], one[1:], strict=True):
        (logprob, letters), (expected, same) = ours.split("\n", 1), truth.split("\n", 1)
        assert letters == same
        assert float(logprob) == pytest.approx(float(expected), abs=3e-6)  # float32, and six digits


def on_a_rank(folder, out, axes):
    return written(folder, out, **axes)


def test_ranks_without_a_word_of_what_they_share_are_refused(folder):
    with pytest.raises(UserError, match=r"2 processes: .* say what they share; --context 2"):
        run_ranks(2, on_a_rank, folder, None, {}, start="fork", timeout=60)


def not_finite_on_ranks():
    """Only prompts of the second data rank have the token whose embedding is not finite."""
    trained = model("KD")
    with torch.no_grad():
        trained.embed_tokens.weight[5] = torch.nan
    parallelize(trained, make_mesh(data=2, context=1, expert=1))
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([5, 5])]
    try:
        generate(trained, prompts, 4, Sampling(allowed=(1, 2)))
    except CheckFailed as error:
        return str(error)
    return ""


def test_a_log_probability_that_is_not_finite_ends_all_ranks():
    for said in run_ranks(2, not_finite_on_ranks, start="fork", timeout=60):
        assert "prompt 1, sample 0 are not finite" in said
