"""A call of the model that could not mean what it says is refused, never answered with a number."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from longstrand.bench._small_models import model
from longstrand.data import Pack
from longstrand.memory import Levers


def test_a_token_or_target_beyond_the_vocabulary_is_refused() -> None:
    pack = Pack.from_documents([torch.tensor([3, 18, 4])])
    beyond = Pack(pack.tokens, torch.tensor([18, 19, -1]), pack.weight, pack.starts)
    with pytest.raises(ValueError, match="token 19 is beyond the vocabulary of 19"):
        model("K").token_logprobs(beyond)
    with pytest.raises(ValueError, match="token 700 is beyond"):
        model("K").token_logprobs(Pack.from_documents([torch.tensor([3, 700, 4])]))
    assert model("K").token_logprobs(pack).isfinite().all()


def test_a_second_walk_back_says_that_a_pass_goes_back_once() -> None:
    small = model("K")
    total = small.token_logprobs(Pack.from_documents([torch.arange(9)]), levers=Levers(tile=4)).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a pass goes back once"):
        total.backward()


@pytest.mark.parametrize("levers", [Levers(4), Levers(4, keep_every=2), Levers(4, recompute=False)], ids=str)
def test_weights_that_change_between_the_passes_are_refused(levers) -> None:
    """Backward would recompute with the new ones: gradients of neither."""
    small = model("KD")
    total = small.token_logprobs(Pack.from_documents([torch.arange(9)]), levers).sum()
    with torch.no_grad():
        small.layers[0].self_attn.q_proj.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_a_copy_adds_up_its_gradients_as_wide_as_the_first_one(again) -> None:
    other = again(model("KD", dtype=torch.bfloat16))
    other.token_logprobs(Pack.from_documents([torch.arange(9)]), Levers(4)).sum().backward()
    assert {parameter.grad.dtype for parameter in other.parameters() if parameter.grad is not None} == {
        torch.float32
    }


def test_choices_that_do_not_exist_are_refused_without_any_type_checker() -> None:
    """In a process of its own: here the hook of jaxtyping would refuse them first."""
    refused = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, check=True)
    assert refused.stdout.splitlines() == [
        'indexer = \'sprase\': must be "frozen", "sparse" or "warmup"',
        "init = 'xavier': must be one of fan_in, class",
        "dtype = torch.int32: must be one of torch.bfloat16, torch.float16, torch.float32, torch.float64",
    ]


WRONG = """
import torch
from longstrand.bench._small_models import architecture
from longstrand.model import SideLosses, load_model

for call in (
    lambda: SideLosses(indexer="sprase"),
    lambda: load_model(architecture("K"), init="xavier"),
    lambda: load_model(architecture("K"), dtype=torch.int32),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""
