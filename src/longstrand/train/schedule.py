"""The learning rate of each step."""

from __future__ import annotations

import math

from longstrand.config import TrainSection


def learning_rate(settings: TrainSection, step: int) -> float:
    """The learning rate of a step, counted from 1.

    It rises linearly to `lr` at step `warmup_steps` and then falls so that the last step has `min_lr * lr`:

        p = (step - peak) / (steps - peak),  peak = max(warmup_steps, 1)
        linear: lr * (1 - (1 - min_lr) * p)      cosine: lr * (min_lr + (1 - min_lr) * (1 + cos(pi p)) / 2)
    """
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    peak = max(settings.warmup_steps, 1)
    part = min((step - peak) / max(settings.steps - peak, 1), 1.0)
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "linear":
        return settings.lr * (1 - (1 - settings.min_lr) * part)
    return settings.lr * (settings.min_lr + (1 - settings.min_lr) * (1 + math.cos(math.pi * part)) / 2)
