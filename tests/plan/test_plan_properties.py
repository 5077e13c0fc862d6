"""What any plan of memory must obey, and the ways in which planners are known to be wrong."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import REAL, SLICE, TOY, toy_job, with_memory, with_ranks

from longstrand.architecture import Architecture
from longstrand.config import parse_length
from longstrand.model import Model
from longstrand.plan.devices import find_device
from longstrand.plan.job import Job
from longstrand.plan.memory import plan_memory
from longstrand.plan.room import memory_of
from longstrand.plan.streams import streams_at_once
from longstrand.plan.terms import Memory, total


def everywhere(memory: Memory) -> int:
    return memory.device_bytes + total(memory.elsewhere)


def on_device(memory: Memory, name: str) -> int:
    """The most in any phase."""
    return max(sum(t.num_bytes for t in terms if t.name == name) for terms in memory.phases.values())


def named(memory: Memory, name: str) -> int:
    """The most on the device in any phase, and what lies elsewhere."""
    return on_device(memory, name) + sum(term.num_bytes for term in memory.elsewhere if term.name == name)


LEVERS = st.fixed_dictionaries(
    {
        "tile": st.sampled_from([128, 512, 1024, 4096]),
        "keep_every": st.sampled_from([1, 2]),
        "offload": st.sampled_from(["none", "host", "disk"]),
        "optimizer": st.sampled_from(["device", "host"]),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    levers=LEVERS,
    tokens=st.integers(64, 2**20),
    more=st.integers(1, 2**20),
    context=st.sampled_from([1, 2, 4]),
)
def test_a_longer_sequence_never_needs_less(levers, tokens, more, context):
    job = with_ranks(with_memory(toy_job(tokens), **levers), context=context)
    longer = replace(job, length=tokens + more)
    assert everywhere(plan_memory(longer)) >= everywhere(plan_memory(job))
    assert plan_memory(longer).device_bytes >= plan_memory(job).device_bytes


@settings(max_examples=60, deadline=None)
@given(
    levers=LEVERS,
    tokens=st.integers(64, 2**20),
    ranks=st.sampled_from([{}, {"context": 4}, {"data": 2, "context": 2, "expert": 4}, {"data": 3}]),
    learns=st.sampled_from(
        [
            {},
            {"trainable": ("head",)},
            {"indexer": "sparse"},
            {"indexer": "warmup", "trainable": ("indexer",)},
        ]
    ),
    others=st.sampled_from(
        [
            {"dtype": "bfloat16", "kind": "gpu"},
            {"sequences_per_step": 5},
            {"balance": "bias", "data_skew": 1.5},
        ]
    ),
)
def test_one_walk_serves_wherever_streams_and_the_optimizer_go(levers, tokens, ranks, learns, others):
    job = with_ranks(with_memory(toy_job(tokens, **learns, **others), **levers), **ranks)
    found, walked = memory_of(job), plan_memory(job)
    assert found == walked and list(found.phases) == list(walked.phases)


@settings(max_examples=25, deadline=None)
@given(levers=LEVERS, tokens=st.integers(64, 2**20), factor=st.integers(2, 8))
def test_a_wider_model_never_needs_less(levers, tokens, factor):
    job = with_memory(toy_job(tokens), **levers)
    wider = replace(
        job,
        shape=replace(
            TOY,
            hidden_size=TOY.hidden_size * factor,
            intermediate_size=TOY.intermediate_size * factor,
            moe_intermediate_size=TOY.moe_intermediate_size * factor,
        ),
    )
    assert plan_memory(wider).device_bytes > plan_memory(job).device_bytes


@pytest.mark.parametrize("shape", [SLICE, REAL, TOY], ids=["slice", "real", "toy"])
@pytest.mark.parametrize("length", [16384, 2**20])
def test_a_lever_never_raises_the_term_that_it_is_for(shape, length):
    job = with_ranks(Job(shape, length), context=8)
    plain = plan_memory(job)
    for place in ("host", "disk"):
        moved = plan_memory(with_memory(job, offload=place))
        assert on_device(moved, "layer inputs") < on_device(plain, "layer inputs")
        assert named(moved, "layer inputs") >= named(
            plain, "layer inputs"
        )  # whole pages, and nothing is lost
    on_host = plan_memory(with_memory(job, optimizer="host"))
    assert on_device(on_host, "moments") == 0
    assert named(on_host, "moments") == named(plain, "moments") or not on_device(plain, "moments")
    layers = shape.num_hidden_layers
    for k in (2, 3, 6):
        if k < layers and streams_at_once(layers, 0, k) < streams_at_once(layers, 0, 1):
            fewer = plan_memory(with_memory(job, keep_every=k))
            assert on_device(fewer, "layer inputs") <= on_device(plain, "layer inputs")


def test_a_smaller_tile_never_raises_what_is_not_kept_per_tile():
    def without_carries(tile: int) -> int:
        memory = plan_memory(with_memory(with_ranks(Job(REAL, 2**20), context=64), tile=tile))
        return sum(term.num_bytes for term in memory.device if "carries" not in term.name)

    sizes = [without_carries(2**power) for power in range(8, 14)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("context", [2, 8])
def test_more_context_ranks_never_need_more_for_layer_inputs(context):
    alone, shared = (plan_memory(with_ranks(Job(SLICE, 2**20), context=n)) for n in (1, context))
    one_more = 4 / 3  # of three streams: the last layer's way back has a gradient beside its input
    assert on_device(shared, "layer inputs") <= 1.001 * one_more * on_device(alone, "layer inputs") / context


# Known faults of planners.


def slope(job: Job, phase: str) -> float:
    """Bytes of a phase per further token of the sequence."""
    twice = replace(job, length=2 * job.length)
    grown = total(plan_memory(twice).phases[phase]) - total(plan_memory(job).phases[phase])
    return grown / job.length


def test_gradients_of_gathered_buffers_are_counted():
    """Each rank holds latents and pool keys of the whole sequence, and on the way back their float32 gradients.

    Per token 512 latents and a quarter of a key of 128 in bfloat16 are 1,088 bytes, gradients of the latents 2,048.
    """
    job = with_memory(with_ranks(Job(REAL, 2**23), context=64), offload="host")
    assert slope(job, "forward") >= 1088
    assert slope(job, "backward") >= 1088 + 2048


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shared", [1, 2])
def test_weights_are_those_of_the_model_by_name(shared, tied):
    """Shared experts are counted once and a head of its own too: each name and size as torch makes it."""
    shape = replace(TOY, n_shared_experts=shared, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Model(shape)
    made = {name: tuple(value.shape) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert {weight.name: tuple(weight.shape) for weight in Job(shape, 1024).weights()} == made


def test_a_head_and_a_shared_expert_weigh_what_the_published_sizes_say():
    """A head of 154,880 x 4,096; a shared expert of three matrices of 4,096 x 2,048 in each of 42 layers."""

    def values(shape: Architecture) -> int:
        return sum(weight.num_values for weight in Job(shape, 1024).weights())

    assert values(REAL) - values(replace(REAL, tie_word_embeddings=True)) == 634_388_480
    assert values(replace(REAL, n_shared_experts=2)) - values(REAL) == 1_056_964_608


def test_a_head_that_learns_has_moments_too():
    """Per value 2 bytes in bfloat16, a float32 master and two moments: 14."""
    untied, tied = (
        total(plan_memory(Job(replace(REAL, tie_word_embeddings=t), 1024)).phases["start"])
        for t in (False, True)
    )
    assert untied - tied >= 634_388_480 * 14


def test_frozen_weights_have_no_gradients_and_no_moments():
    frozen, all_of_it = (
        plan_memory(Job(SLICE, 16384, trainable=groups)) for groups in (("norms",), ("all",))
    )
    weights = sum(w.num_bytes for w in Job(SLICE, 16384).weights())
    assert weights <= total(frozen.phases["start"]) < 1.02 * weights
    assert total(all_of_it.phases["start"]) > 4 * weights  # two moments of twice the bytes each


def test_memory_is_gib_and_not_gb():
    """ "192 GB" on the box; a process sees 178 GiB, which are 191 GB."""
    assert find_device("b200").memory_bytes == 191_126_044_672


def test_bytes_are_whole_numbers_beyond_32_bits():
    million, more = 2**20, 2**26
    jobs = [with_ranks(Job(REAL, length), context=8) for length in (million, more)]
    for job in jobs:
        memory = plan_memory(job)
        terms = [*memory.elsewhere, *(term for terms in memory.phases.values() for term in terms)]
        assert all(type(term.num_bytes) is int and term.num_bytes >= 0 for term in terms)
    inputs = [on_device(plan_memory(job), "layer inputs") for job in jobs]
    assert inputs[0] > 2**32
    assert inputs[1] == pytest.approx(64 * inputs[0], rel=0.05)


def test_no_plan_grows_with_tokens_times_vocabulary():
    """A planner that counts logits of all tokens is as wrong as one that forgets the head's block."""
    small, large = (Job(replace(SLICE, vocab_size=v), 2**20) for v in (32768, 154880))
    grown = slope(large, "backward") - slope(small, "backward")
    assert abs(grown) < 24_000  # bytes per token, where logits of bfloat16 would be 244,224


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("131072", 131072), ("512k", 524288), ("1M", 1048576), ("4m", 4194304), ("1_000", 1000), ("16K", 16384)],
)
def test_lengths_are_read(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["1G", "1.5M", "", "-1k", "1 M", "1MB", "9" * 31])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="whole number of tokens"):
        parse_length(text)


def test_a_pack_says_how_many_sequences_it_holds():
    """Ids, targets and weights of all sequences of a step, 8 + 8 + 4 bytes a token, lie on every rank."""
    one, three = (Job(TOY, 5000, number, dtype="float32") for number in (1, 3))
    packs = [{term.name: term for term in plan_memory(job).phases["start"]}["pack"] for job in (one, three)]
    assert [pack.num_bytes for pack in packs] == [5000 * 20, 3 * 5000 * 20]
    assert packs[0].why.startswith("5,000 tokens: ids") and packs[1].why.startswith(
        "3 sequences of 5,000 tokens"
    )
