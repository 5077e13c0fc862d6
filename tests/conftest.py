"""One thread, and shapes checked: in tests, jaxtyping reads every annotation of the packages below."""

import torch
from jaxtyping import install_import_hook

CHECKED = [f"longstrand.{name}" for name in ("ops", "memory", "parallel", "model", "train", "rl")]

# Before any of these modules is imported; without the hook, annotations cost nothing.
install_import_hook(CHECKED, "beartype.beartype")

torch.set_num_threads(1)
