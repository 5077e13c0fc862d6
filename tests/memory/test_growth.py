"""What a step keeps per token, counted in bytes of living tensors and in resident memory."""

import pytest
import torch
from live_tensors import LiveTensors

from longstrand.bench._small_models import documents, model
from longstrand.bench._steps import architecture
from longstrand.bench.memory import bytes_per_token, measure
from longstrand.data.pack import Pack
from longstrand.memory import Levers, SideLosses
from longstrand.model import load_model

TILE = 128


def peak_bytes(trained, length, indexer="frozen", vocabulary=256, levers=Levers(TILE)):
    """Largest number of bytes alive at once in tensors that a forward and a walk back made."""
    given = Pack.from_documents(documents((length,), vocabulary=vocabulary))
    side = SideLosses(indexer=indexer, indexer_scale=1e-3)
    with LiveTensors() as live:
        trained.token_logprobs(given, levers, side).sum().backward()
    trained.zero_grad(set_to_none=True)
    return live.peak


@pytest.mark.parametrize(
    "levers",
    [
        pytest.param({}, id="no lever"),
        pytest.param({"keep_every": 2}, id="keep_every", marks=pytest.mark.slow),
        pytest.param({"offload": "disk"}, id="disk"),
    ],
)
def test_the_live_tensors_of_a_step_grow_by_what_has_to_be_kept(levers, tmp_path):
    """Between both lengths nothing else changes: the expression holds within a twentieth, for each lever."""
    trained = load_model(architecture("toy"))
    disk = levers.get("offload") == "disk"
    given = Levers(TILE, **levers, spool=str(tmp_path) if disk else None)
    growth = (peak_bytes(trained, 768, levers=given) - peak_bytes(trained, 512, levers=given)) / 256
    terms = bytes_per_token(architecture("toy"), tile=TILE, keep_every=given.keep_every, offload=disk)
    assert growth == pytest.approx(sum(terms.values()), rel=0.05)


@pytest.mark.parametrize("kinds", ["K", "KKK"])
def test_what_a_border_between_tiles_costs_is_its_carries(kinds):
    """Halving the tile doubles the borders; each keeps a state and J - 1 tokens per KDA layer."""
    trained = model(kinds, dtype=torch.float32, vocab_size=19)
    length = 256
    wide, narrow = (peak_bytes(trained, length, vocabulary=19, levers=Levers(tile)) for tile in (64, 32))
    carry = (2 * 8 * 8 + 3 * 3 * 2 * 8) * 4 * len(kinds)
    assert narrow - wide <= 1.5 * carry * (length // 32 - length // 64)


@pytest.mark.slow
def test_the_resident_memory_of_a_step_grows_by_what_has_to_be_kept():
    (record,) = measure(lengths=(16_384, 65_536))
    assert record["pass"], record


def test_the_expression_is_that_of_the_architecture():
    """The real model in bfloat16: 1.406 MiB of layer inputs per token, 22 KiB of pool ids, latents of 1 KiB."""
    from dataclasses import replace

    shape = replace(
        architecture("toy"),
        hidden_size=4096,
        num_hidden_layers=45,
        layer_types=tuple("indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(45)),
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 42,
        indexer_types=("full",) * 45,
        index_topk=2048,
        kv_lora_rank=512,
        n_routed_experts=288,
        num_experts_per_tok=8,
    )
    terms = bytes_per_token(shape, element_bytes=2)
    assert terms["layer inputs"] == 44 * 32 * 1024  # one layer less: its input is the embedding
    assert terms["last mean"] == 8 * 1024
    assert terms["selected pools"] == 11 * 2048
    assert terms["chosen experts"] == 42 * 16
    assert (terms["selected pools"] + terms["chosen experts"]) / 1024 == pytest.approx(22.7, abs=0.05)
    assert terms["latents of one layer"] == 1024
