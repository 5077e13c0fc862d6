"""Decoding from the carry gives what one full forward over prompt and generated tokens gives."""

import pytest
import torch

from longstrand.bench._small_models import documents, model
from longstrand.data import Pack
from longstrand.memory import Levers
from longstrand.model.decode import Decoding, prefill
from longstrand.ops.native import use_native

NEW = 9
LENGTHS = (1, 2, 3, 4, 5, 12, 13, 15, 16, 17, 31, 32, 33, 70)
"""Around pools of 4, index_topk = 12, chunks of 16 and tiles of 16."""


def decoded(trained, prompts, continuations, tile=16, room=3):
    """Log-probabilities of given continuations, all sequences in one batch: [B, NEW]."""
    decoding = Decoding(trained, [prefill(trained, prompt, tile) for prompt in prompts], room)
    found = []
    for token in torch.stack(continuations).T:
        found.append(decoding.logprobs().gather(-1, token[:, None])[:, 0])
        decoding.append(token)
    return torch.stack(found, dim=1)


def full_forward(trained, prompts, continuations):
    """The same from one pass over each whole sequence."""
    with torch.no_grad():
        return torch.stack(
            [
                trained.token_logprobs(Pack.from_documents([torch.cat([a, b])]), levers=Levers(tile=1000))[
                    len(a) - 1 : -1
                ]
                for a, b in zip(prompts, continuations, strict=True)
            ]
        )


def sequences(seed=1, lengths=LENGTHS):
    return documents(lengths, seed=seed), documents((NEW,) * len(lengths), seed=seed + 1)


@pytest.mark.parametrize("kinds", ["KDDK", "DKD"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
def test_many_sequences_at_once_get_the_log_probabilities_of_a_full_forward(kinds, dtype, limit):
    """A second "D" in a row shares the pools of the first; buffers start too small and grow twice."""
    trained = model(kinds, dtype=dtype)
    prompts, continuations = sequences()
    found, expected = (of(trained, prompts, continuations) for of in (decoded, full_forward))
    assert (found - expected).abs().max() <= limit


def test_each_sequence_of_a_batch_gets_what_it_gets_alone():
    trained = model("KDDK")
    prompts, continuations = sequences(lengths=(1, 3, 16, 33))
    together = decoded(trained, prompts, continuations)
    for row, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        alone = decoded(trained, [prompt], [continuation])
        assert (together[row] - alone[0]).abs().max() <= 1e-10


@pytest.mark.parametrize("tile", [1, 7, 16])
def test_the_tile_of_the_prompt_changes_nothing(tile):
    trained = model("KDDK")
    prompts, continuations = sequences(lengths=(1, 5, 17, 33))
    found = decoded(trained, prompts, continuations, tile=tile)
    assert (found - decoded(trained, prompts, continuations, tile=1000)).abs().max() <= 1e-10


@pytest.mark.parametrize("kpool", [1, 2, 16])
def test_other_pool_sizes(kpool):
    trained = model("DK", index_kpool=kpool, index_topk=3 * kpool)
    lengths = (1, 2, kpool - 1 or 1, kpool, kpool + 1, 3 * kpool, 3 * kpool + 1, 5 * kpool - 1)
    prompts, continuations = sequences(seed=4, lengths=lengths)
    found, expected = (of(trained, prompts, continuations) for of in (decoded, full_forward))
    assert (found - expected).abs().max() <= 1e-10


def test_sequences_that_end_leave_the_others_as_they_were():
    trained = model("KDDK")
    prompts, continuations = sequences()
    decoding = Decoding(trained, [prefill(trained, prompt, 16) for prompt in prompts], room=2)
    tokens, kept = torch.stack(continuations), torch.tensor([1, 4, 7, 13])
    for step in range(NEW - 1):
        decoding.append(tokens[:, step])
        if step == 3:
            decoding.keep(kept)
            tokens = tokens[kept]
    expected = full_forward(trained, [prompts[i] for i in kept], [continuations[i] for i in kept])
    found = decoding.logprobs().gather(-1, tokens[:, -1:])[:, 0]
    assert (found - expected[:, -1]).abs().max() <= 1e-10


def test_copies_of_one_prompt_go_their_own_ways():
    trained = model("KDDK")
    prompt, continuations = documents((22,), seed=8)[0], documents((NEW,) * 3, seed=9)
    prefix = prefill(trained, prompt, 16)
    for _ in range(2):  # what one decoding writes does not reach the prefix
        decoding = Decoding(trained, [prefix] * 3)
        for token in torch.stack(continuations).T[:-1]:
            decoding.append(token)
        found = decoding.logprobs().gather(-1, torch.stack(continuations)[:, -1:])[:, 0]
        expected = full_forward(trained, [prompt] * 3, continuations)[:, -1]
        assert (found - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_the_cpu_kernels(dtype):
    """In bfloat16 a value may round the other way: 2^-8 of a logit of size 1, a few of them."""
    state = use_native("auto")
    if not state.used:
        pytest.skip(f"the CPU kernels cannot be built: {state.reason}")
    try:
        trained = model("KDDK").convert(dtype)
        prompts, continuations = sequences()
        found, expected = (of(trained, prompts, continuations) for of in (decoded, full_forward))
    finally:
        use_native("portable")
    assert (found - expected).abs().max() <= (1e-4 if dtype == torch.float32 else 2**-6)
