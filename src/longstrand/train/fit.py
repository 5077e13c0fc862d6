"""Whether a recipe, its data and the shape of its model fit each other."""

from __future__ import annotations

from longstrand.architecture import Architecture
from longstrand.config import Recipe
from longstrand.data import Data
from longstrand.errors import UserError
from longstrand.plan import rules


def require_vocabulary(recipe: Recipe, data: Data, shape: Architecture) -> None:
    """Refuses data with tokens that the model has not."""
    if data.max_token >= shape.vocab_size:
        raise UserError(
            f"data.tokenizer = {recipe.data.tokenizer}: gives token {data.max_token}, and the model's vocabulary "
            f"has {shape.vocab_size}; use the model's own tokenizer"
        )


def require_effect(recipe: Recipe, shape: Architecture) -> None:
    """Refuses what this model has no part for."""
    rules.require_effect(recipe.train.balance, recipe.train.indexer, recipe.data.length, shape)
