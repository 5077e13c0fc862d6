"""Generation: prompts go through the model tile by tile, then many sequences grow by one token at a time."""

from longstrand.generate.rollout import generate
from longstrand.generate.sampling import Sampling
from longstrand.generate.turns import Generated

__all__ = ["Generated", "Sampling", "generate"]
