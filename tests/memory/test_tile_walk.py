"""Forward alone, tile after tile through all layers, against the scan, layer after layer."""

import pytest
import torch
from live_tensors import LiveTensors

from longstrand.bench._small_models import documents, model, pack
from longstrand.bench._steps import architecture
from longstrand.data.pack import Pack
from longstrand.memory import Levers, SideLosses
from longstrand.model import load_model

LENGTHS = (1, 2, 3, 21, 33, 5)


@pytest.mark.parametrize(
    ("tile", "dtype"),
    [(5, torch.float64), (16, torch.float32), (16, torch.bfloat16), (1000, torch.float32)],
    ids=str,
)
def test_without_a_graph_come_the_same_bits_as_with_one(tile, dtype):
    """A pack with documents shorter than a pool and across tiles; a layer that shares the pools of the one below."""
    trained, given = model("KDDK", dtype=dtype), pack(LENGTHS)
    sides = SideLosses(), SideLosses()
    with_graph = trained.token_logprobs(given, levers=Levers(tile=tile), side=sides[0])
    hidden = trained.hidden(given, levers=Levers(tile=tile))
    assert with_graph.requires_grad
    with torch.no_grad():
        without = trained.token_logprobs(given, levers=Levers(tile=tile), side=sides[1])
        assert torch.equal(trained.hidden(given, levers=Levers(tile=tile)), hidden)
    assert torch.equal(without, with_graph)
    counts = [side.expert_counts for side in sides]
    assert counts[0].keys() == counts[1].keys() and len(counts[0]) == 3
    assert all(torch.equal(counts[0][layer], counts[1][layer]) for layer in counts[0])


def test_a_frozen_model_keeps_nothing_either():
    frozen, given = model("KDDK").requires_grad_(False), pack(LENGTHS)
    found = frozen.token_logprobs(given, levers=Levers(tile=33))
    assert not found.requires_grad
    assert torch.equal(found, model("KDDK").token_logprobs(given, levers=Levers(tile=33)))


def test_what_grows_with_the_length_is_the_latents_the_pool_keys_and_the_pack():
    """No stream of the residual width: 2,048 bytes per token each in the toy."""
    trained, peaks = load_model(architecture("toy")), []
    for length in (256, 512):
        given = Pack.from_documents(documents((length,), vocabulary=256))
        with LiveTensors() as live, torch.no_grad():
            trained.token_logprobs(given, levers=Levers(tile=64))
        peaks.append(live.peak)
    latents, pool_keys = 32 * 4, 32 * 4 // 4
    copies, result = 3 * 8, 4  # the pack on the model's device, the output
    assert (peaks[1] - peaks[0]) / 256 <= 1.1 * (latents + pool_keys + copies + result)
