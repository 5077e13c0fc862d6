"""Weights sharded over ranks: gradients, norm and weights are those of one process with all packs."""

import dataclasses

import pytest
import torch
from tiny_training import TINY, documents, settings

from longstrand.data import Pack
from longstrand.memory import Levers
from longstrand.model import load_model
from longstrand.model.sharding import shard_weights
from longstrand.parallel import make_mesh, run_ranks
from longstrand.train.optimizer import freeze_all_but, trained_names

PACKS = [
    Pack.from_documents(documents(*lengths, seed=seed))
    for seed, lengths in enumerate([(9, 14), (21,), (5,), (17, 3)])
]


def _model(dtype, tied, trainable):
    model = load_model(dataclasses.replace(TINY, tie_word_embeddings=tied), dtype=dtype, seed=1)
    freeze_all_but(model, trained_names(model.groups(), settings(trainable=trainable)))
    return model


def _walk(model, packs, levers):
    for pack in packs:
        (-model.token_logprobs(pack, levers).double() * pack.weight).sum().backward()


def _gradients(model):
    """Whole, by name."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:
            gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return gradients


def _sharded(packs_per_rank, dtype, tied, trainable, levers):
    mesh = make_mesh(data=2, context=1, expert=1)
    model = shard_weights(_model(dtype, tied, trainable), mesh)
    first = mesh.data.rank * packs_per_rank
    _walk(model, PACKS[first : first + packs_per_rank], levers)
    return _gradients(model)


@pytest.mark.parametrize(
    ("packs_per_rank", "tied", "trainable", "levers"),
    [
        (1, False, ["all"], Levers(tile=8)),
        (2, True, ["all"], Levers(tile=5)),
        (1, False, ["all"], Levers(tile=8, recompute=False)),
        (2, False, ["mla", "router"], Levers(tile=8, keep_every=2)),
        (1, True, ["mla", "embedding"], Levers(tile=64)),
    ],
)
def test_gradients_are_those_of_one_process_with_all_packs(packs_per_rank, tied, trainable, levers):
    alone = _model(torch.float64, tied, trainable)
    _walk(alone, PACKS[: 2 * packs_per_rank], levers)
    expected = _gradients(alone)
    arguments = packs_per_rank, torch.float64, tied, trainable, levers
    for found in run_ranks(2, _sharded, *arguments, start="fork", timeout=100):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10, msg=name)
