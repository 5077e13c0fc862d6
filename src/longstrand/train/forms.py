"""Which form each op of a run takes: the recipe's requirement at the start, and kernels.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from longstrand.atomic import write_atomic
from longstrand.config import Recipe
from longstrand.model import Model
from longstrand.model.forms import Plan, plan_forms
from longstrand.model.given import Pass
from longstrand.ops.padding import Tiles

FILE = "kernels.json"


def forms_of(recipe: Recipe, model: Model) -> Plan:
    """Of this rank's training passes, over one document of the recipe's length."""
    return plan_forms(model.architecture, pass_of(recipe, model))


def pass_of(recipe: Recipe, model: Model) -> Pass:
    """The recipe's training pass of one document of its length."""
    tiles = Tiles(model.spans(recipe.data.length), recipe.memory.tile)
    return Pass(getattr(torch, recipe.run.dtype), tiles, recipe.train.indexer, model.norm.weight.device.type)


def record_of(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """What kernels.json holds."""
    return {"require": recipe.kernels.require, **plan.as_dict()}


def write_forms(run: Path, recipe: Recipe, model: Model) -> None:
    write_atomic(run / FILE, json.dumps(record_of(recipe, forms_of(recipe, model)), indent=1))
