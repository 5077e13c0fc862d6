"""What the tests of counted memory share."""

import gc

import pytest
import torch

from longstrand.memory.counted import CountedMemory


@pytest.fixture
def counted():
    memory = CountedMemory(torch.device("cpu"))
    if memory.why_not is not None:
        pytest.skip(memory.why_not)
    gc.collect()
    memory.take()
    return memory
