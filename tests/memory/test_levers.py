"""Levers change where and when, never what: results with a lever on are those with it off, bit by bit."""

import pytest
import torch

from longstrand.bench._small_models import MODES, documents, losses, model, train_only
from longstrand.data.pack import Pack
from longstrand.memory import Levers

LENGTHS = (1, 23, 5, 40)
KINDS = "KDDKKDK"  # DD: the second shares the first one's pools


def outcome(trained, mode, levers, dtype=torch.float64):
    """Log-probabilities, every gradient, the side losses and the experts' counts of one pass."""
    given = Pack.from_documents(documents(LENGTHS))
    side = losses(given, mode)
    trained.zero_grad(set_to_none=True)
    logprobs = trained.token_logprobs(given, side=side, levers=levers)
    weight = torch.randn(len(given), generator=torch.Generator().manual_seed(3))
    (logprobs * weight.to(logprobs.dtype)).sum().backward()
    found = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    trained.zero_grad(set_to_none=True)
    sums = {"kl": torch.tensor(side.indexer_kl), "aux": torch.tensor(side.aux)}
    counts = {f"experts of layer {layer}": count for layer, count in side.expert_counts.items()}
    return {"log-probabilities": logprobs.detach()} | found | sums | counts


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_every", [2, 3, 5])
def test_layers_run_again_give_the_inputs_they_gave_before(mode, keep_every):
    trained = train_only(model(KINDS), *(["indexer"] if mode == "warmup" else []))
    wanted = outcome(trained, mode, Levers(16))
    assert_same(outcome(trained, mode, Levers(16, keep_every)), wanted)


def test_groups_of_layers_are_counted_from_the_lowest_that_trains():
    trained = model(KINDS)
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(name.startswith(("layers.2.mlp", "layers.5", "lm_head")))
    wanted = outcome(trained, "frozen", Levers(16))
    assert_same(outcome(trained, "frozen", Levers(16, 2)), wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tile", "keep_every"), [(16, 1), (5, 2), (100, 3)])
def test_streams_on_a_disk_are_what_they_are_in_memory(mode, tile, keep_every, tmp_path):
    trained = train_only(model(KINDS), *(["indexer"] if mode == "warmup" else []))
    wanted = outcome(trained, mode, Levers(tile))
    assert_same(outcome(trained, mode, Levers(tile, keep_every, "disk", str(tmp_path))), wanted)
    assert list(tmp_path.iterdir()) == []
