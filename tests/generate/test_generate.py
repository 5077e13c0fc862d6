"""Generation against repeated full forwards, and against the definition of each way to draw."""

import pytest
import torch

from longstrand.bench._small_models import documents, model
from longstrand.data import Pack
from longstrand.errors import CheckFailed, UserError
from longstrand.generate import Sampling, generate
from longstrand.memory import Levers

LENGTHS = (1, 3, 4, 13, 16, 33)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def trained():
    return model("KDDK")


def next_logprobs(trained, tokens):
    """log p of every possible next token, each scored by one full forward."""
    vocabulary = trained.architecture.vocab_size
    given = Pack.from_documents([torch.cat([tokens, torch.tensor([w])]) for w in range(vocabulary)])
    with torch.no_grad():
        return trained.token_logprobs(given, levers=Levers(tile=1000))[given.starts[1:] - 2]


def test_greedy_decoding_is_the_argmax_of_repeated_full_forwards(trained):
    prompts = documents(LENGTHS, seed=2)
    for prompt, found in zip(prompts, generate(trained, prompts, 5, GREEDY), strict=True):
        tokens = prompt
        for token, logprob in zip(found.tokens, found.logprobs, strict=True):
            expected = next_logprobs(trained, tokens)
            assert int(token) == int(expected.argmax())
            assert abs(float(logprob - expected.max())) <= 1e-10
            tokens = torch.cat([tokens, token[None]])


def test_log_probabilities_are_the_models_own_whatever_is_drawn(trained):
    """Not those of the tempered, cut and restricted distribution."""
    prompts = documents(LENGTHS, seed=2)
    sampling = Sampling(temperature=0.6, top_k=5, top_p=0.9, seed=3, allowed=(1, 2, 3, 5, 8, 13))
    for prompt, found in zip(prompts, generate(trained, prompts, 9, sampling), strict=True):
        given = Pack.from_documents([torch.cat([prompt, found.tokens])])
        with torch.no_grad():
            expected = trained.token_logprobs(given)[len(prompt) - 1 : -1]
        assert (found.logprobs - expected).abs().max() <= 1e-10
        assert set(found.tokens.tolist()) <= set(sampling.allowed)
        inside = next_logprobs(trained, prompt)[list(sampling.allowed)].exp().sum()
        (first,) = generate(trained, [prompt], 1, sampling)
        assert first.excluded == pytest.approx(1 - float(inside), abs=1e-10)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_sequence_depends_on_its_own_place_alone(trained, batch):
    prompts = documents((1, 4, 13, 33), seed=2)
    sampling = Sampling(seed=7)
    together = generate(trained, prompts, 6, sampling, num_samples=2, batch=64)
    found = generate(trained, prompts, 6, sampling, num_samples=2, batch=batch, tile=7)
    assert [each.tokens.tolist() for each in found] == [each.tokens.tolist() for each in together]
    more = generate(trained, prompts[:2], 6, sampling, num_samples=3)
    assert torch.equal(more[3].tokens, together[2].tokens)
    assert not torch.equal(together[0].tokens, together[1].tokens)
    other = generate(trained, prompts, 6, Sampling(seed=8))
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(other, together[::2], strict=True))


def test_a_stop_token_ends_its_own_sequence_and_belongs_to_it(trained):
    prompts, sampling = documents(LENGTHS, seed=2), Sampling(seed=1)
    free = generate(trained, prompts, 12, sampling)
    stop = int(free[2].tokens[4])
    stopping = generate(trained, prompts, 12, Sampling(seed=1, stop=(stop,)))
    assert any(each.stopped for each in stopping) and not any(each.stopped for each in free)
    for each, whole in zip(stopping, free, strict=True):
        tokens = whole.tokens.tolist()
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert each.tokens.tolist() == tokens[:end]
        assert each.stopped == (stop in tokens)
        assert (each.logprobs - whole.logprobs[:end]).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"top_k": 4}, "temperature = 0: takes the most likely token"),
        ({"top_p": 0.5}, "temperature = 0: takes the most likely token"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        Sampling(temperature=0, **given)


def test_equal_samples_are_refused(trained):
    with pytest.raises(UserError, match="num_samples = 2: at temperature 0 all samples"):
        generate(trained, documents(LENGTHS), 2, Sampling(temperature=0), num_samples=2)


def frequencies(sampling, logits, draws=40_000):
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    rows = torch.tensor(logits).log_softmax(-1).expand(draws, -1)
    return torch.bincount(sampling.draw(rows, uniform), minlength=len(logits)) / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.2, 0.4, 0.1, 0.3]),
        (Sampling(temperature=0.5), [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        (Sampling(temperature=1e-310), [0, 1, 0, 0]),
        (Sampling(temperature=1e300), [0.25, 0.25, 0.25, 0.25]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_k=9), [0.2, 0.4, 0.1, 0.3]),
        (Sampling(top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.75), [2 / 9, 4 / 9, 0, 3 / 9]),
        (Sampling(top_p=1e-9), [0, 1, 0, 0]),
        (Sampling(top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(temperature=0), [0, 1, 0, 0]),
        (Sampling(allowed=(2, 0)), [2 / 3, 0, 1 / 3, 0]),
        (Sampling(allowed=(2, 0), top_k=1), [1, 0, 0, 0]),
        (Sampling(allowed=(2, 3), temperature=0), [0, 0, 0, 1]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in vars(value).items()) if hasattr(value, "stop") else "",
)
def test_tokens_are_drawn_as_often_as_their_probability_says(sampling, expected):
    """On an even grid of numbers, so that a frequency is exact to one draw per token."""
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64).log().tolist()
    assert torch.allclose(frequencies(sampling, logits).double(), torch.tensor(expected).double(), atol=2e-4)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(uniform):
    rows = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert Sampling().draw(rows, torch.tensor([uniform], dtype=torch.float64)).tolist() == [1]


def test_equal_probabilities_take_the_lowest_id_without_temperature():
    assert Sampling(temperature=0).draw(torch.zeros(1, 5), torch.zeros(1)).tolist() == [0]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"temperature": -0.5}, "temperature = -0.5: must be 0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"top_k": 0}, "top_k = 0: must be at least 1"),
        ({"top_p": 0.0}, "top_p = 0: must be above 0"),
        ({"top_p": 1.5}, "top_p = 1.5: must be above 0 and at most 1"),
        ({"allowed": ()}, "no token could be drawn"),
    ],
)
def test_a_sampling_that_cannot_be_is_refused(setting, says):
    with pytest.raises(UserError, match=says):
        Sampling(**setting)


@pytest.mark.parametrize(
    ("prompts", "changes", "says"),
    [
        ([[]], {}, "prompt 0: empty"),
        ([[1], [2, 19]], {}, "prompt 1: holds tokens from 2 to 19"),
        ([[1]], {"num_samples": 0}, "num_samples = 0: must be at least 1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([[1]], {"batch": 0}, "batch = 0"),
        ([[1]], {"sampling": Sampling(allowed=(3, 19))}, "allowed: token 19 is beyond"),
    ],
)
def test_what_cannot_be_continued_is_refused(trained, prompts, changes, says):
    given = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    with pytest.raises(UserError, match=says):
        generate(trained, given, **{"max_new_tokens": 3, **changes})


def test_weights_that_are_not_finite_stop_the_generation():
    broken = model("KD")
    broken.norm.weight.data[0] = torch.nan
    with pytest.raises(CheckFailed, match=r"prompt 0, sample 0 are not finite at new token 0"):
        generate(broken, [torch.tensor([1])], 3)


def test_no_prompt_gives_nothing(trained):
    assert generate(trained, [], 3) == []
