"""A model that is filled part by part as it is cut: the numbers of the whole one, and never more than a layer of it."""

import dataclasses

import pytest
import torch
from tiny_training import TINY, settings

from longstrand.config import ParallelSection
from longstrand.memory.counted import CountedMemory
from longstrand.model import load_model, save_model
from longstrand.model.load import open_weights, outline_model
from longstrand.model.parallelize import parallelize
from longstrand.parallel import local_part, make_mesh, run_ranks
from longstrand.plan.devices import find_device
from longstrand.plan.job import Job
from longstrand.plan.room import Room
from longstrand.plan.search import plan_of
from longstrand.plan.summary import loading_bytes
from longstrand.train.optimizer import freeze_all_but, trained_names

ELEVEN = dataclasses.replace(  # layers.10 comes before layers.2 in the order of names
    TINY,
    num_hidden_layers=11,
    layer_types=(TINY.layer_types * 3)[:11],
    mlp_layer_types=("dense", *["sparse"] * 10),
    indexer_types=("full",) * 11,
)
TIED = dataclasses.replace(TINY, tie_word_embeddings=True)


def _trained(model):
    freeze_all_but(model, trained_names(model.groups(), settings(trainable=["kda", "experts"])))
    return model


def _filled(source, dtype, mesh):
    model = _trained(outline_model(source, dtype))
    with open_weights(source, model, seed=3) as weights:
        return parallelize(model, mesh, receive=16, weights=weights)


def _differences(source, dtype, expert):
    """What is not alike between both ways to come to this rank's part: names, and attributes of parameters."""
    mesh = make_mesh(data=1, context=torch.distributed.get_world_size(), expert=expert)
    found = _filled(source, dtype, mesh)
    whole = parallelize(_trained(load_model(source, dtype, seed=3)), mesh, receive=16)
    pairs = zip(
        [*found.named_parameters(), *found.named_buffers()],
        [*whole.named_parameters(), *whole.named_buffers()],
        strict=True,
    )
    return [
        name
        for (name, one), (other_name, other) in pairs
        if name != other_name
        or type(one) is not type(other)
        or one.dtype != other.dtype
        or one.requires_grad != other.requires_grad
        or not torch.equal(local_part(one), local_part(other))
    ] + [found.source] * ((found.source is None) != (whole.source is None))


@pytest.mark.parametrize(
    ("shape", "dtype", "ranks", "expert"),
    [
        (ELEVEN, torch.float32, 2, 1),
        (ELEVEN, torch.bfloat16, 2, 2),
        (TIED, torch.float64, 2, 1),
        (TINY, torch.bfloat16, 4, 2),
        (TIED, torch.bfloat16, 1, 1),
    ],
)
@pytest.mark.parametrize("saved", [False, True], ids=["drawn", "folder"])
def test_each_rank_has_the_rows_that_it_would_keep_of_the_whole(shape, dtype, ranks, expert, saved, tmp_path):
    source = save_model(load_model(shape, dtype, seed=5), tmp_path / "model") if saved else shape
    for differences in run_ranks(ranks, _differences, source, dtype, expert, start="fork", timeout=100):
        assert differences == []


def _most_living(source):
    """Bytes: most while a rank loads, its own part, the whole model, its largest layer."""
    memory = CountedMemory(torch.device("cpu"))
    mesh = make_mesh(data=1, context=2, expert=2)
    before = memory.live()
    memory.take()
    kept = _filled(source, torch.float32, mesh)
    most, own = memory.take() - before, memory.live() - before
    del kept
    whole = _bytes(outline_model(source))
    return most, own, whole, max(map(_bytes, outline_model(source).layers))


def _bytes(module):
    return sum(parameter.numel() * 4 for parameter in module.parameters())


@pytest.mark.parametrize("vocab_size", [512, 20_000], ids=["a layer is largest", "the head is"])
def test_a_rank_holds_no_more_than_a_plan_says_it_loads(vocab_size):
    if (why_not := CountedMemory(torch.device("cpu")).why_not) is not None:
        pytest.skip(why_not)
    wide = dataclasses.replace(ELEVEN, moe_intermediate_size=256, vocab_size=vocab_size)
    job = Job(wide, 1024, dtype="float32", parallel=ParallelSection(context=2, expert=2))
    planned = loading_bytes(plan_of(job, Room(find_device("CPU"), 2), job, ())) / 2
    for most, own, whole, layer in run_ranks(2, _most_living, wide, start="fork", timeout=100):
        assert own + layer < most < planned < 1.1 * most
        assert most < 0.75 * whole or vocab_size > 512
