"""The router's side: what is counted, when, and the auxiliary loss."""

from dataclasses import replace

import plain_model
import pytest
import torch

from longstrand.bench._small_models import documents, gradients, largest_difference, losses, model
from longstrand.data.pack import Pack
from longstrand.memory import Levers, SideLosses


def test_experts_are_counted_once_per_step_in_the_first_pass():
    """A08: recompute must not count again, and every layer counts its own tokens."""
    trained, given = model("KDKD"), Pack.from_documents(documents((30, 11)))
    side = SideLosses()
    gradients(trained, given, 7, side)
    with torch.no_grad():
        only_forward = SideLosses()
        trained.token_logprobs(given, levers=Levers(tile=7), side=only_forward)
    assert set(side.expert_counts) == {1, 2, 3}  # layer 0 is dense
    for layer, counts in side.expert_counts.items():
        assert int(counts.sum()) == 41 * 2
        assert torch.equal(counts, only_forward.expert_counts[layer])


def test_evaluation_counts_nowhere():
    trained, given = model("KD"), Pack.from_documents(documents((30,)))
    side = SideLosses()
    gradients(trained, given, 7, side)
    before = {layer: counts.clone() for layer, counts in side.expert_counts.items()}
    with torch.no_grad():
        trained.token_logprobs(given, levers=Levers(tile=7))
    assert all(torch.equal(before[layer], counts) for layer, counts in side.expert_counts.items())


def test_the_auxiliary_loss_is_transformers():
    from transformers.models.glm5_next import modeling_glm5_next as modeling

    trained, each = model("KDK"), documents((30, 11))
    with torch.no_grad():  # without a bias, the choice is that of the logits alone
        for name, value in trained.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.zero_()
    side = SideLosses(aux_scale=0.3)
    gradients(trained, Pack.from_documents(each), 7, side)
    logits = plain_model.run(trained, each).router_logits
    theirs = modeling.load_balancing_loss_func(
        tuple(torch.cat(layer).detach() for layer in logits.values()), num_experts=6, top_k=2
    )
    assert side.aux == pytest.approx(float(theirs), rel=1e-6)


def test_the_auxiliary_loss_has_the_gradient_of_its_formula():
    trained, each = model("KDDK"), documents((30, 11, 3))
    given = Pack.from_documents(each)
    side = SideLosses(aux_scale=0.3)
    _, grads = gradients(trained, given, 7, side, weight=torch.zeros(len(given)))
    whole = plain_model.run(trained, each)
    (0.3 * whole.aux_loss()).backward()
    assert side.aux == pytest.approx(float(whole.aux_loss().detach()), rel=1e-12)
    wanted = {name: grad for name, grad in whole.gradients().items() if grad is not None and name in grads}
    error, where = largest_difference({name: grads[name] for name in wanted}, wanted)
    assert error <= 1e-9, where


def test_the_auxiliary_gradient_is_the_same_in_one_pack_and_in_four():
    """R19: shares are those of the whole step, and every part adds its own tokens."""
    trained, each = model("KDK"), documents((9, 30, 4, 17))
    whole = Pack.from_documents(each)
    side = losses(whole, "frozen")
    weight = torch.zeros(len(whole))
    _, together = gradients(trained, whole, 64, side, weight=weight)
    apart, aux = {}, 0.0
    for document in each:
        part = SideLosses(aux_scale=side.aux_scale)
        trained.zero_grad(set_to_none=True)
        logprobs = trained.token_logprobs(Pack.from_documents([document]), levers=Levers(tile=64), side=part)
        part.expert_counts = side.expert_counts
        (logprobs * 0).sum().backward()
        aux += part.aux
        for name, parameter in trained.named_parameters():
            if parameter.grad is not None:
                apart[name] = apart.get(name, 0) + parameter.grad
    assert aux == pytest.approx(side.aux, rel=1e-12)
    assert float(together["layers.1.mlp.gate.weight"].norm()) > 0
    error, where = largest_difference(together, apart)
    assert error <= 1e-10, where


def test_without_side_losses_nothing_is_reported():
    trained, given = model("KD"), Pack.from_documents(documents((9,)))
    side = SideLosses()
    gradients(trained, given, 4, side)
    assert (side.indexer_kl, side.aux) == (0.0, 0.0)


def test_a_mixed_stack_counts_every_layer_with_experts_and_no_other():
    """R20: a dense layer between does not stop those after it."""
    kinds = ["dense", "sparse", "dense", "sparse"]
    trained = model("KDKD", mlp_layer_types=kinds, first_k_dense_replace=1)
    side = SideLosses()
    gradients(trained, Pack.from_documents(documents((9,))), 4, side)
    assert {layer: int(counts.sum()) for layer, counts in side.expert_counts.items()} == {1: 18, 3: 18}
    again = replace(side, expert_counts={})
    gradients(trained, Pack.from_documents(documents((9,))), 4, again)
    assert {layer: int(counts.sum()) for layer, counts in again.expert_counts.items()} == {1: 18, 3: 18}
