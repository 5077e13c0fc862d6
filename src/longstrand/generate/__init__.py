"""Generation: prompts go through the model tile by tile, then many sequences grow by one token at a time."""

from longstrand.generate.rollout import Generated, generate
from longstrand.generate.sampling import Sampling

__all__ = ["Generated", "Sampling", "generate"]
