"""Training the indexer: its loss and gradients against the whole model written as full matrices."""

from dataclasses import replace
from itertools import pairwise

import plain_model
import pytest
import torch

from longstrand.bench._small_models import (
    LENGTHS,
    documents,
    gradients,
    largest_difference,
    losses,
    model,
    train_only,
    upstream,
)
from longstrand.data.pack import Pack
from longstrand.memory import Levers, SideLosses

INDEXER = {
    f"layers.1.self_attn.indexer.{name}"
    for name in (
        "wq_b.weight",
        "wk.weight",
        "weights_proj.weight",
        "k_norm.weight",
        "k_norm.bias",
        "index_kpool_compress_ape",
        "index_kpool_compress_gate",
    )
}


def plain(trained, given_documents, mode, side):
    """Log-probabilities, the KL, and gradients of the plain model under the same losses."""
    whole = plain_model.run(trained, given_documents, mode)
    logprobs = torch.cat(whole.logprobs)
    loss = side.indexer_scale * whole.indexer_kl
    if mode != "warmup":
        loss = loss + (logprobs * upstream(len(logprobs))).sum() + side.aux_scale * whole.aux_loss()
    loss.backward()
    grads = {name: grad for name, grad in whole.gradients().items() if grad is not None}
    return logprobs.detach(), float(torch.as_tensor(whole.indexer_kl).detach()), grads


@pytest.mark.parametrize("kinds", ["KDK", "DDK"])
def test_the_sparse_mode_is_the_full_matrix_definition_with_every_gradient(kinds):
    trained, each = model(kinds), documents()
    given = Pack.from_documents(each)
    side = losses(given, "sparse")
    ours, grads = gradients(trained, given, 64, side)
    truth, kl, wanted = plain(trained, each, "sparse", side)
    assert torch.allclose(ours, truth, rtol=0, atol=1e-12)
    assert side.indexer_kl == pytest.approx(kl, rel=1e-12)
    error, where = largest_difference(grads, wanted)
    assert error <= 1e-9, where


@pytest.mark.parametrize("kinds", ["KDK", "DDK"])
def test_the_warm_up_is_the_full_matrix_definition_over_all_visible_pools(kinds):
    trained, each = train_only(model(kinds), "indexer"), documents()
    given = Pack.from_documents(each)
    side = losses(given, "warmup")
    ours, grads = gradients(trained, given, 64, side)
    truth, kl, wanted = plain(trained, each, "warmup", side)
    assert torch.allclose(ours, truth, rtol=0, atol=1e-12)  # dense attention
    assert side.indexer_kl == pytest.approx(kl, rel=1e-12)
    error, where = largest_difference(grads, {name: wanted[name] for name in grads})
    assert error <= 1e-9, where


def test_other_gradients_are_those_without_the_indexers_loss():
    """A17: the KL reaches the indexer alone."""
    trained, given = model("DDK"), Pack.from_documents(documents())
    _, without = gradients(trained, given, 64, SideLosses())
    _, with_loss = gradients(trained, given, 64, SideLosses(indexer="sparse", indexer_scale=5.0))
    moved = {name for name in with_loss if ".indexer." in name}
    assert moved == {name.replace("layers.1", "layers.0") for name in INDEXER}
    for name, grad in with_loss.items():
        if name in moved:
            assert grad.isfinite().all()
            assert float(grad.norm()) > 0
        else:
            assert torch.allclose(grad, without[name], rtol=1e-12, atol=1e-12), name


def test_the_warm_up_moves_only_the_indexer():
    trained, given = model("KDK"), Pack.from_documents(documents())
    _, grads = gradients(trained, given, 64, SideLosses(indexer="warmup", indexer_scale=1.0))
    own = {name for name in grads if name.startswith("layers.") and float(grads[name].norm()) > 0}
    assert own == INDEXER
    assert float(grads.get("embed_tokens.weight", torch.zeros(1)).norm()) == 0


@pytest.mark.parametrize("mode", ["frozen", "sparse", "warmup"])
def test_a_weight_of_zero_runs_through_and_moves_nothing(mode):
    """A17: with weight 0 an indexer that drops out of the graph would break bookkeeping."""
    trained, given = train_only(model("KDK"), "indexer"), Pack.from_documents(documents())
    _, grads = gradients(trained, given, 64, SideLosses(indexer=mode, indexer_scale=0.0))
    assert all(float(grad.norm()) == 0 for grad in grads.values())


def test_the_loss_does_not_depend_on_its_scale_and_the_gradient_is_proportional():
    trained, given = train_only(model("KDK"), "indexer"), Pack.from_documents(documents())
    found = []
    for scale in (1.0, 1e-3):
        side = SideLosses(indexer="sparse", indexer_scale=scale)
        found.append((gradients(trained, given, 64, side)[1], side.indexer_kl))
    assert found[0][1] == found[1][1] > 0
    for name in INDEXER:
        assert torch.allclose(found[0][0][name] * 1e-3, found[1][0][name], rtol=1e-9)


def test_gradients_are_those_of_finite_differences_through_the_whole_model():
    """One entry of every indexer tensor, in warm-up, where no choice can flip."""
    trained, given = train_only(model("DK"), "indexer"), Pack.from_documents(documents((29, 6)))

    def kl():
        side = SideLosses(indexer="warmup", indexer_scale=1.0)
        trained.token_logprobs(given, levers=Levers(tile=19), side=side).sum().backward()
        return side.indexer_kl

    side = SideLosses(indexer="warmup", indexer_scale=1.0)
    _, grads = gradients(trained, given, 19, side)
    generator = torch.Generator().manual_seed(0)
    for name in sorted(grads):
        flat = trained.get_parameter(name).data.view(-1)
        for place in torch.randint(len(flat), (1,), generator=generator).tolist():
            kept, slopes = float(flat[place]), []
            for step in (1e-5, -1e-5):
                flat[place] = kept + step
                slopes.append(kl())
            flat[place] = kept
            slope = (slopes[0] - slopes[1]) / 2e-5
            assert float(grads[name].view(-1)[place]) == pytest.approx(slope, rel=1e-5, abs=1e-6), name


def test_rows_without_a_complete_pool_count_nothing():
    trained = model("KDK")
    for mode in ("sparse", "warmup"):
        side = SideLosses(indexer=mode, indexer_scale=1.0)
        given = Pack.from_documents(documents((1, 2, 3, 3)))
        assert given.indexer_rows(4) == 0
        train_only(trained, "indexer")
        _, grads = gradients(trained, given, 4, side)
        assert side.indexer_kl == 0
        assert all(float(grad.norm()) == 0 for name, grad in grads.items() if ".indexer." in name)


def test_training_on_the_loss_makes_the_selection_follow_the_attention():
    """Plain gradient steps on the warm-up loss alone lower it."""
    trained, given = train_only(model("DK"), "indexer"), Pack.from_documents(documents((65,)))
    seen = []
    for _ in range(8):
        side = SideLosses(indexer="warmup", indexer_scale=1 / given.indexer_rows(4))
        _, grads = gradients(trained, given, 65, side)
        seen.append(side.indexer_kl)
        with torch.no_grad():
            for name, grad in grads.items():
                trained.get_parameter(name).sub_(0.3 * grad)
    assert all(after < before for before, after in pairwise(seen)), seen


def test_a_layer_that_shares_its_pools_has_no_loss_of_its_own():
    """DD: the second layer selects what the first one chose, whose own attention is the target."""
    trained, each = model("DD"), documents((41,))
    given = Pack.from_documents(each)
    side = SideLosses(indexer="sparse", indexer_scale=1.0)
    gradients(trained, given, 13, side)
    kl = float(torch.as_tensor(plain_model.run(trained, each, "sparse").indexer_kl).detach())
    assert side.indexer_kl == pytest.approx(kl, rel=1e-12)
    assert not any(name.startswith("layers.1.self_attn.indexer") for name, _ in trained.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1, 5, 203])
@pytest.mark.parametrize("kpool", [1, 2, 16])
@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_other_pool_sizes_and_tiles(mode, kpool, tile):
    trained = train_only(model("KDK", index_kpool=kpool, index_topk=32), "indexer")
    each = documents(LENGTHS)
    given = Pack.from_documents(each)
    side = replace(losses(given, mode), aux_scale=0.0)
    _, grads = gradients(trained, given, tile, side)
    _, kl, wanted = plain(trained, each, mode, side)
    assert side.indexer_kl == pytest.approx(kl, rel=1e-11)
    error, where = largest_difference(grads, {name: wanted[name] for name in grads})
    assert error <= 1e-9, where
