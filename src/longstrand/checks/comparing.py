"""Two ways to compute the same step: how far they differ, and where that begins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longstrand.checks.watching import Found
from longstrand.model import Model

FLOOR = 1e-6
"""Of the largest norm: what is smaller is compared with that."""

KINDS = {"linear_attention": "KDA", "indexed_attention": "DSA"}


@dataclass(frozen=True)
class Names:
    """What the parts of a model are called.

    Attributes:
        kinds: of each layer.
        groups: of each parameter.
    """

    kinds: tuple[str, ...]
    groups: Mapping[str, str]

    @classmethod
    def of(cls, model: Model) -> Names:
        kinds = tuple(KINDS[kind] for kind in model.architecture.layer_types)
        return cls(kinds, {name: group for group, names in model.groups().items() for name in names})

    def layer(self, index: int) -> str:
        return f"layer {index} ({self.kinds[index]})"


@dataclass(frozen=True)
class Difference:
    """The largest relative differences of each kind, and the first place where one exceeds a limit.

    Attributes:
        logprobs, norm: None where they are not compared.
        group: of parameters, whose gradient differs most (after a resumed step: whose values).
        where: None where nothing exceeds the limit.
    """

    loss: float
    logprobs: float | None
    gradient: float
    group: str
    where: str | None
    norm: float | None = None

    @classmethod
    def refused(cls, words: str) -> Difference:
        """Of a step that was not taken, in its own words."""
        return cls(math.nan, None, math.nan, "", words)


def compare(found: Found, truth: Found, names: Names, limit: float) -> Difference:
    """How far `found` is from `truth`, and which part is the first to exceed `limit`: forward, then backward."""
    parameters = _by_name(found.parameters, truth.parameters)
    worst = max(parameters, key=lambda name: _ranked(parameters[name]))
    return Difference(
        loss=_of_numbers(found.values["loss"], truth.values["loss"]),
        logprobs=_of_values(found.logprobs, truth.logprobs),
        gradient=parameters[worst],
        group=names.groups[worst],
        where=_forward(found, truth, names, limit) or _backward(found, truth, parameters, names, limit),
        norm=_of_numbers(found.values.get("norm", math.nan), truth.values["norm"]),
    )


def largest(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> tuple[float, str]:
    """Over all names, and which one it is."""
    each = _by_name(found, truth)
    worst = max(each, key=lambda name: _ranked(each[name]))
    return each[worst], worst


def exceeds(value: float, limit: float) -> bool:
    """What is no number exceeds every limit."""
    return not value <= limit


def _forward(found: Found, truth: Found, names: Names, limit: float) -> str | None:
    for layer in range(len(names.kinds)):
        if exceeds(_of_tensors(found.outputs.get(layer), truth.outputs[layer]), limit):
            return f"{names.layer(layer)}, forward"
    if exceeds(_of_values(found.logprobs, truth.logprobs), limit):
        return "the log-probabilities: the head, the last norm or the targets"
    for layer in sorted(truth.counts):
        if not torch.equal(found.counts.get(layer, torch.empty(0)), truth.counts[layer]):
            return f"tokens counted for the experts of layer {layer}"
    if exceeds(_of_numbers(found.values["loss"], truth.values["loss"]), limit):
        return "the loss"
    return None


def _backward(
    found: Found, truth: Found, parameters: Mapping[str, float], names: Names, limit: float
) -> str | None:
    norms = {layer: float(values.double().norm()) for layer, values in truth.gradients.items()}
    least = FLOOR * max(norms.values(), default=0.0)
    wrong = {name for name, value in parameters.items() if exceeds(value, limit)}
    for layer in sorted(truth.gradients, reverse=True):
        if exceeds(_of_tensors(found.gradients.get(layer), truth.gradients[layer], least), limit):
            if layer == len(names.kinds) - 1 and wrong & {"norm.weight", "lm_head.weight"}:
                return "the gradient of the loss, or the head, backward"
            return f"{names.layer(layer)}, backward"
    if wrong:
        return f"gradients of {_parameters(wrong, parameters, names)}"
    for name in truth.values.keys() - {"loss"}:
        if exceeds(_of_numbers(found.values.get(name, math.nan), truth.values[name]), limit):
            return "the norm of the gradients" if name == "norm" else f"the {name}"
    return None


def _parameters(wrong: set[str], parameters: Mapping[str, float], names: Names) -> str:
    """The groups that differ in the uppermost layer, with the other layers where the same ones do."""
    of_layer: dict[int, set[str]] = {}
    for name in wrong:
        if name.startswith("layers."):
            of_layer.setdefault(int(name.split(".")[1]), set()).add(name)
    if not of_layer:
        return ", ".join(sorted({names.groups[name] for name in wrong}))
    top = max(of_layer)
    groups = {names.groups[name] for name in of_layer[top]}
    if groups == {names.groups[name] for name in parameters if name.startswith(f"layers.{top}.")}:
        return f"all groups of {names.layer(top)}"
    same = [i for i in sorted(of_layer) if {names.groups[name] for name in of_layer[i]} == groups]
    return f"{', '.join(sorted(groups))} of layer{'s' * (len(same) > 1)} {', '.join(map(str, same))}"


def _by_name(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each: norm of the difference over its own norm, or over `FLOOR` of the largest where that is more."""
    norms = {name: float(value.double().norm()) for name, value in truth.items()}
    least = FLOOR * max(norms.values(), default=0.0)
    return {name: _of_tensors(found.get(name), value, least) for name, value in truth.items()}


def _of_tensors(found: Tensor | None, truth: Tensor, least: float = 0.0) -> float:
    if found is None or found.shape != truth.shape:
        return math.inf
    if torch.equal(found, truth):
        return 0.0
    over = max(float(truth.double().norm()), least)
    distance = float((found.double() - truth.double()).norm())
    return distance / over if over else math.inf


def _of_values(found: Tensor, truth: Tensor) -> float:
    """Of the most different one, over the largest."""
    if found.shape != truth.shape:
        return math.inf
    if torch.equal(found, truth):
        return 0.0
    over = float(truth.double().abs().max())
    return float((found.double() - truth.double()).abs().max()) / over if over else math.inf


def _of_numbers(found: float, truth: float) -> float:
    if found == truth:
        return 0.0
    return abs(found - truth) / abs(truth) if truth else math.inf


def _ranked(value: float) -> float:
    """What is no number is worst."""
    return math.inf if math.isnan(value) else value
