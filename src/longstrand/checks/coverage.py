"""What a certificate does not say, in words."""

from __future__ import annotations

from longstrand.architecture import DSA, Architecture
from longstrand.checks.sample import Packs
from longstrand.config import ParallelSection, Recipe


def not_checked(recipe: Recipe, shape: Architecture, packs: Packs, axes: ParallelSection) -> str:
    """What these packs and axes leave out, as the rest of a sentence."""
    longest = max(len(document) for pack in packs for document in pack)
    left = [
        f"documents longer than {longest:,} tokens",
        f"rounding in {recipe.run.dtype}" if recipe.run.dtype != "float64" else "",
        "other devices than this CPU",
    ]
    if DSA in shape.layer_types and longest < shape.index_topk + shape.index_kpool:
        left.append(
            f"the choice among more than index_topk = {shape.index_topk:,} tokens, which needs longer documents"
        )
    if alone := [name for name in ("data", "context", "expert") if getattr(axes, name) == 1]:
        left.append(f"more than one rank of {' and '.join(alone)}")
    if "host" in (recipe.memory.offload, recipe.memory.optimizer):
        left.append("what lies in a GPU's host memory")
    if recipe.train.trainable != ["all"]:
        left.append("gradients of what the recipe freezes")
    left.append("whether the model computes what its definition says (longstrand bench parity does)")
    return ", ".join(filter(None, left))
