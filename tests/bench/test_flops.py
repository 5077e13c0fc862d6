"""Operations of a step: against torch's own counter on transformers and on the definitions, and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

from longstrand.bench._small_models import architecture
from longstrand.ops.kda import kda_reference
from longstrand.ops.mhc import mhc_update_reference
from longstrand.ops.sparse_attention import sparse_attention_reference
from longstrand.plan.products import (
    dsa_terms,
    feed_forward_terms,
    indexer_terms,
    kda_terms,
    mean_attended,
    mean_pools,
    mhc_terms,
    step_flops,
    terms,
)

TOKENS = 24


@pytest.fixture(scope="module")
def counted():
    """Operations per token of each module of transformers' model, one K and one D layer, both kinds of feed-forward."""
    shape = architecture("KD")
    config = Glm5NextTextConfig(**shape.to_hf())
    model = Glm5NextTextModel._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(19, (1, TOKENS)), use_cache=False)
    found = {name: sum(each.values()) / TOKENS for name, each in counter.get_flop_counts().items()}
    return shape, {name.removeprefix("Glm5NextTextModel."): value for name, value in found.items()}


def total(counts, layer, names):
    return sum(counts[f"layers.{layer}.self_attn.{name}"] for name in names)


def test_the_projections_of_linear_attention_are_those_that_transformers_computes(counted):
    shape, counts = counted
    projections, gates, _ = (term.forward for term in kda_terms(shape))
    assert projections == total(counts, 0, ["q_proj", "k_proj", "v_proj", "o_proj"])
    low_rank = ["forget_gate.f_a_proj", "forget_gate.f_b_proj", "g_a_proj", "g_b_proj", "b_proj"]
    assert gates == total(counts, 0, low_rank)


def test_the_projections_of_sparse_attention_and_its_indexer_are_those_that_transformers_computes(counted):
    shape, counts = counted
    projections, absorbed, *_ = (term.forward for term in dsa_terms(shape, TOKENS, "full"))
    assert projections == total(counts, 1, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])
    # Absorbing a projection into the query and the output costs what expanding every latent with it does.
    assert absorbed == total(counts, 1, ["kv_b_proj"])
    light = ["indexer.wq_b", "indexer.wk", "indexer.weights_proj"]
    gate = 2 * shape.hidden_size * shape.index_head_dim  # a bare parameter there, so no module of its own
    assert indexer_terms(shape, TOKENS)[0].forward == total(counts, 1, light) + gate


def test_the_feed_forward_parts_are_those_that_transformers_computes(counted):
    shape, counts = counted
    assert sum(term.forward for term in feed_forward_terms(shape, "dense")) == counts["layers.0.mlp"]
    assert sum(term.forward for term in feed_forward_terms(shape, "sparse")) == counts["layers.1.mlp"]


def test_the_coefficients_and_the_mixing_of_streams(counted):
    shape, counts = counted
    x, out = torch.randn(3, 4, 16), torch.randn(3, 16)
    with FlopCounterMode(display=False) as counter:
        mhc_update_reference(x, out, torch.randn(3, 4), torch.randn(3, 4, 4))
    (term,) = mhc_terms(shape)
    site = counts["layers.0.attn_hc"] + counter.get_total_flops() / 3
    assert term.forward == 2 * (site + 2 * 2 * 4 * 16)  # pre x and post out are no products to the counter


def test_the_state_is_read_twice_and_updated_once_per_token():
    shape = architecture("K", linear_num_heads=3, linear_head_dim=8)
    q, k, v, g = (torch.randn(1, 5, 3, 8) for _ in range(4))
    with FlopCounterMode(display=False) as counter:
        kda_reference(q, k, v, -g.abs(), torch.rand(1, 5, 3), torch.zeros(1, 3, 8, 8))
    update = 3 * 2 * 8 * 8  # an outer product added to the state: no product of matrices to the counter
    assert kda_terms(shape)[2].forward == counter.get_total_flops() / 5 + update


@pytest.mark.parametrize("length", [1, 3, 4, 12, 13, 16, 31, 66])
def test_the_attended_tokens_and_visible_pools_are_causal_means(length):
    kpool, topk = 4, 12
    pools = [(t + 1) // kpool for t in range(length)]
    attended = [
        min(seen, topk // kpool) * kpool + ((t + 1) % kpool if t % kpool != kpool - 1 else 0)
        for t, seen in enumerate(pools)
    ]
    assert mean_pools(length, kpool) == pytest.approx(sum(pools) / length)
    assert mean_attended(length, topk, kpool) == pytest.approx(sum(attended) / length)


def test_attention_in_latent_space_against_the_definition():
    shape, length = architecture("D", index_topk=8), 30
    select = 2
    pools = torch.full((length, select), -1, dtype=torch.int32)
    for t in range(length):
        seen = min((t + 1) // 4, select)
        pools[t, :seen] = torch.arange(seen)
    q, latents = torch.randn(length, 2, 8), torch.randn(32, 8)
    with FlopCounterMode(display=False) as counter:
        sparse_attention_reference(q, latents, pools, torch.arange(length), kpool=4, scale=0.3)
    assert dsa_terms(shape, length, "full")[2].forward * length == pytest.approx(counter.get_total_flops())


def test_a_step_is_three_forwards_but_for_the_frozen_indexer():
    shape = architecture("KDKD")
    found = terms(shape, 100)
    frozen = sum(term.forward for term in found if "indexer" in term.name)
    assert step_flops(shape, 100) == pytest.approx(3 * sum(t.forward for t in found) - 2 * frozen)
    assert frozen == 2 * sum(term.forward for term in indexer_terms(shape, 100))


def test_a_shared_indexer_costs_nothing_again():
    shape = architecture("KDD")
    assert (
        sum(t.forward for t in terms(shape, 64) if "scores" in t.name) == indexer_terms(shape, 64)[1].forward
    )


def test_the_published_scale_of_scoring():
    """The real model at 1,048,576 tokens: 131,072 pools in the mean, 1.07 GFLOP per layer and token."""
    shape = architecture("D", index_n_heads=32, index_head_dim=128, index_kpool=4, index_topk=2048)
    assert indexer_terms(shape, 2**20)[1].forward == pytest.approx(1.07e9, rel=0.01)
