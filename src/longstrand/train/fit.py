"""Whether a recipe, its data and the shape of its model fit each other."""

from __future__ import annotations

from longstrand.architecture import DSA, Architecture
from longstrand.config import Recipe
from longstrand.data import Data
from longstrand.errors import UserError


def require_vocabulary(recipe: Recipe, data: Data, shape: Architecture) -> None:
    """Refuses data with tokens that the model has not."""
    if data.max_token >= shape.vocab_size:
        raise UserError(
            f"data.tokenizer = {recipe.data.tokenizer}: gives token {data.max_token}, and the model's vocabulary "
            f"has {shape.vocab_size}; use the model's own tokenizer"
        )


def require_effect(recipe: Recipe, shape: Architecture) -> None:
    """Refuses what this model has no part for: a setting without effect would be a silent one."""
    balance, indexer = recipe.train.balance, recipe.train.indexer
    if balance != "none" and "sparse" not in shape.mlp_layer_types:
        raise UserError(f'train.balance = "{balance}": this model has no router to balance; set it to "none"')
    if indexer != "frozen" and DSA not in shape.layer_types:
        raise UserError(f'train.indexer = "{indexer}": this model has no indexer; set it to "frozen"')
    if indexer != "frozen" and recipe.data.length < shape.index_kpool:
        raise UserError(
            f"data.length = {recipe.data.length}: no sequence completes a pool of {shape.index_kpool} tokens, so "
            f'train.indexer = "{indexer}" learns nothing; raise the length, or set it to "frozen"'
        )
