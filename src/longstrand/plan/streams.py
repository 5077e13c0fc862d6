"""Which layer inputs a pass keeps, and how many streams live at once; read by the walk and by the planner."""

from __future__ import annotations

from longstrand.plan.job import Job


def kept_inputs(num_layers: int, first: int, keep_every: int) -> set[int]:
    """The layers whose input a pass keeps, counted from `first`, the lowest that trains.

    Those of the last group are all kept: backward begins with them, so they would be recomputed at once. Layer 0 has
    no input to keep, since the embedding gives it again.
    """
    starts = range(first, num_layers, keep_every)
    return {*starts, *range(starts[-1], num_layers)} - {0} if starts else set()


def streams_at_once(num_layers: int, first: int, keep_every: int) -> int:
    """The most streams of a pass that live at the same time; R x D x e bytes per token each.

    Going forward: the kept inputs, or one running stream below `first`. Going back, dx overwrites x, so that a group
    needs the inputs kept up to its own, its keep_every - 1 recomputed ones, and the gradient from above.
    """
    kept = kept_inputs(num_layers, first, keep_every)
    most = max(len(kept), 1 if num_layers > 1 else 0)
    for start in range(first, num_layers, keep_every)[:-1]:
        most = max(most, sum(index <= start for index in kept) + keep_every)
    return most


def first_trained_layer(job: Job) -> int:
    """The lowest layer at which the walk back ends: 0 where the embedding learns, their number where none does."""
    trained = [weight for weight in job.weights() if weight.trains]
    if any(weight.name.startswith("embed_tokens") for weight in trained):
        return 0
    layers = (weight.layer for weight in trained if weight.layer is not None)
    return min(layers, default=job.shape.num_hidden_layers)
