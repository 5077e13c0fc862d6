"""A rank's part of a model, filled from its folder or drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from longstrand.config import Recipe
from longstrand.errors import UserError
from longstrand.model import Model
from longstrand.model.load import open_weights
from longstrand.model.parallelize import parallelize
from longstrand.parallel import Mesh, said_once, together
from longstrand.trained import model_source


def place_model(
    recipe: Recipe, model: Model, mesh: Mesh, loading: Callable[[], AbstractContextManager[None]]
) -> None:
    """Leaves this rank its part of a model, which is filled meanwhile where it has no numbers yet.

    Args:
        loading: entered while it is filled.

    Raises:
        UserError: the model cannot be spread as `[parallel]` says, or its weights cannot be used; on all ranks.
    """
    sizes, source = recipe.parallel, model_source(recipe.model)
    put = partial(
        parallelize,
        model,
        mesh,
        segments=sizes.segments_per_rank,
        receive=sizes.receive_rows(recipe.memory.tile),
    )
    if not model.norm.weight.is_meta:
        with said_once(mesh.world, UserError):
            put()
        return
    if mesh.devices is not None:
        mesh.view("world", mesh.devices.device_type)  # ranks meet for it, and for nothing in what follows
    with (
        together(mesh.world),
        loading(),
        open_weights(source, model, recipe.run.seed, recipe.model.init) as weights,
    ):
        put(weights=weights)
