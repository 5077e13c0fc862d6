"""Fresh memory that shows when it is read before it is written."""

import pytest
import torch


@pytest.fixture
def fresh_memory_is_nan():
    """`torch.empty` and its kin come filled with NaN, or with the largest integer."""
    was = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was[0]
    torch.use_deterministic_algorithms(was[1])
