"""Drawn models, packs, tiles and side losses against the whole model written as full matrices."""

import random
from itertools import pairwise

import plain_model
import pytest
import torch

from longstrand.bench._small_models import MODES, documents, gradients, model, train_only, upstream
from longstrand.data.pack import Pack
from longstrand.memory import SideLosses


def draw(seed):
    """A model with 1 to 4 layers of any order and odd sizes, a pack, a tile and a mode."""
    rng = random.Random(f"drawn {seed}")
    kinds = "".join(rng.choice("KD") for _ in range(rng.randint(1, 4)))
    kpool, experts = rng.choice([1, 2, 3, 4, 16]), rng.choice([2, 3, 8, 300])
    indexers = ["full"]
    for before, kind in pairwise(kinds):
        may_share = before + kind == "DD" and indexers[-1] == "full"
        indexers.append("shared" if may_share and rng.random() < 0.5 else "full")
    sizes = {
        "index_kpool": kpool,
        "index_topk": kpool * rng.choice([1, 2, 5]),
        "index_n_heads": rng.choice([1, 3, 16]),
        "linear_num_heads": rng.choice([1, 3]),
        "linear_head_dim": rng.choice([1, 5, 8]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4, 6]),
        "hc_mult": rng.choice([1, 2, 3, 4]),
        "hc_sinkhorn_iters": rng.choice([1, 2, 20]),
        "n_routed_experts": experts,
        "num_experts_per_tok": min(experts, rng.choice([1, 2, 3])),
        "num_attention_heads": rng.choice([1, 3]),
        "v_head_dim": rng.choice([1, 5]),
        "indexer_types": indexers,
        "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in kinds],
        "swiglu_limit": rng.choice([0.5, 10.0]),
        "tie_word_embeddings": rng.random() < 0.3,
        "linear_lower_bound": rng.choice([-5.0, -0.5]),
    }
    lengths = tuple(rng.choice([1, 2, 3, 4, 5, 7, 15, 16, 17, 33, 50]) for _ in range(rng.randint(1, 6)))
    mode = rng.choice(MODES if "D" in kinds else ["frozen"])
    return (
        model(kinds, seed, **sizes),
        documents(lengths, seed),
        rng.choice([1, 2, 3, 5, 16, 17, 64, 500]),
        mode,
    )


def check(seed):
    trained, each, tile, mode = draw(seed)
    given = Pack.from_documents(each)
    rows = max(given.indexer_rows(trained.architecture.index_kpool), 1)
    warm = mode == "warmup"
    side = SideLosses(mode, 0.0 if mode == "frozen" else 0.7 / rows, aux_scale=0.0 if warm else 0.3)
    train_only(trained, *(["indexer"] if warm else []))
    logprobs, grads = gradients(trained, given, tile, side)
    whole = plain_model.run(trained, each, mode)
    truth = torch.cat(whole.logprobs)
    loss = 0 * truth.sum() + side.indexer_scale * whole.indexer_kl
    if not warm:
        loss = loss + (truth * upstream(len(truth))).sum()
        loss = loss + (side.aux_scale * whole.aux_loss() if whole.router_logits else 0)
    loss.backward()
    assert torch.allclose(logprobs, truth, rtol=0, atol=1e-11)
    if mode != "frozen":
        assert side.indexer_kl == pytest.approx(float(torch.as_tensor(whole.indexer_kl).detach()), abs=1e-10)
    wanted = {name: grad for name, grad in whole.gradients().items() if grad is not None}
    largest = max(float(grad.norm()) for grad in wanted.values())
    for name, parameter in trained.named_parameters():
        if parameter.requires_grad and name in wanted:
            scale = max(float(wanted[name].norm()), 1e-6 * largest, 1e-6)
            missing = torch.zeros_like(wanted[name])
            assert float((grads.get(name, missing) - wanted[name]).norm()) <= 1e-8 * scale, name


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_model_is_its_definition(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 120))
def test_many_drawn_models_are_their_definition(seed):
    check(seed)
