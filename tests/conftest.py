"""One thread, plain torch, and shapes checked: in tests, jaxtyping reads every annotation of the packages below."""

import pytest
import torch
from jaxtyping import install_import_hook

CHECKED = [f"longstrand.{name}" for name in ("ops", "memory", "parallel", "model", "train", "rl")]

# Before any of these modules is imported; without the hook, annotations cost nothing.
install_import_hook(CHECKED, "beartype.beartype")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def plain_torch_again():
    """A run, an evaluation or a generation puts the CPU kernels to use for the whole process: not for the next test."""
    yield
    from longstrand.ops.native import use_native

    use_native("portable")
