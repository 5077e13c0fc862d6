"""A pack that could not mean what it says is refused when it is made."""

import pytest
import torch
from torch import Tensor

from longstrand.data import Pack

TOKENS = torch.tensor([5, 6, 7, 8])


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([], "at least one document"),
        ([TOKENS, TOKENS[:0]], "at least one token"),
        ([TOKENS + 0.5], "whole numbers"),
        ([TOKENS > 6], "whole numbers"),
        ([torch.tensor([5, -1, 6])], "count from 0"),
    ],
)
def test_documents_without_tokens_or_with_numbers_that_are_none_are_refused(
    documents: list[Tensor], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Pack.from_documents(documents)


def test_weights_of_another_length_are_refused() -> None:
    for weights in ([torch.ones(3)], [torch.ones(4), torch.ones(4)]):
        with pytest.raises(ValueError, match="lengths of their documents"):
            Pack.from_documents([TOKENS], weights)


@pytest.mark.parametrize("starts", [[0], [0, 2], [0, 9], [1, 4], [0, 2, 2, 4], [0, 3, 2, 4]])
def test_documents_must_fill_the_pack_one_after_the_other(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="rise from 0 to its number of tokens"):
        Pack(TOKENS, TOKENS, torch.ones(4), torch.tensor(starts))


def test_every_token_has_a_target_and_a_weight() -> None:
    with pytest.raises(ValueError, match="one length"):
        Pack(TOKENS, TOKENS[:3], torch.ones(4), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="-1 for none"):
        Pack(TOKENS, TOKENS - 10, torch.ones(4), torch.tensor([0, 4]))


def test_documents_of_any_whole_dtype_are_the_same_pack() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32):
        pack = Pack.from_documents([TOKENS.to(dtype), TOKENS[:1].to(dtype)])
        assert pack.tokens.tolist() == [5, 6, 7, 8, 5] and pack.tokens.dtype == torch.int64
        assert pack.targets.tolist() == [6, 7, 8, -1, -1]
