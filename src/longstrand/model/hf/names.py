"""What a checkpoint calls each parameter: published names, transformers' names, and where their parts lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from longstrand.architecture import Architecture
from longstrand.plan.parameters import Shape, parameter_shapes

PREFIX = "model.language_model."
# A text-only folder, the base model saved alone, and the text model saved alone.
_PREFIXES = (PREFIX, "model.", "language_model.", "")
_MTP_MARKS = ("eh_proj.", "enorm.", "hnorm.", "shared_head.")


@dataclass(frozen=True)
class Part:
    """One place where a tensor of a file and a parameter of the model hold the same numbers."""

    tensor: str  # name in the files, without the prefix of the text model
    parameter: str
    index: tuple[int | slice, ...] = ()  # parameter[index] is the part; () is all of it
    rows: tuple[int, int] | None = None  # tensor[first:last] is the part; None is all of it


def spellings(parameter: str, shape: Shape) -> Iterator[list[Part]]:
    """The ways in which a checkpoint may hold a parameter, the published one first."""
    direct = [Part(parameter, parameter)]
    stem, _, leaf = parameter.rpartition(".")
    if conv := re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", parameter):
        first = "qkv".index(conv[2]) * shape[0]
        yield direct
        yield [Part(f"{conv[1]}.conv1d.weight", parameter, rows=(first, first + shape[0]))]
    elif gate := re.fullmatch(r"(.*self_attn)\.((f_a_proj|f_b_proj)\.weight|dt_bias|A_log)", parameter):
        yield direct
        yield [Part(f"{gate[1]}.forget_gate.{gate[2]}", parameter)]
    elif hyper := re.fullmatch(r"(.*)\.hc_(attn|ffn)_(fn|base|scale)", parameter):
        yield direct
        yield [Part(f"{hyper[1]}.{hyper[2]}_hc.{hyper[3]}", parameter)]
    elif stem.endswith("mlp.experts"):
        yield _per_expert(stem, leaf, parameter, shape)
        yield direct
    else:
        yield direct


def published_parts(architecture: Architecture) -> list[Part]:
    """How a model without a source is written."""
    shapes = parameter_shapes(architecture)
    return [part for name, shape in shapes.items() for part in next(spellings(name, shape))]


def full_name(tensor: str, prefix: str = PREFIX) -> str:
    """The name of a tensor in a file; the head stands outside the text model."""
    return tensor if tensor.startswith("lm_head.") else prefix + tensor


def find_prefix(names: Iterable[str]) -> str | None:
    """What stands before `embed_tokens.weight` in a file; None where no known prefix fits."""
    names = set(names)
    return next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names), None)


def kept_aside(names: Iterable[str], prefix: str, num_hidden_layers: int) -> set[str]:
    """The tensors of the vision tower and of multi-token prediction: not ours, passed on as they are.

    A whole decoder layer past the last one without the marks of multi-token prediction is not among them: it
    would mean that `num_hidden_layers` is too small.
    """
    names = set(names)
    visual = prefix.replace("language_model.", "") + "visual."
    aside = {name for name in names if name.startswith((visual, "mtp.", prefix + "mtp."))}
    layers: dict[int, list[str]] = {}
    for name in names:
        if found := re.match(re.escape(prefix) + r"layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(found[1]), []).append(found[2])
            if ".shared_head." in name:
                aside.add(name)
    for layer, inside in layers.items():
        marked = any(name.startswith(_MTP_MARKS) for name in inside)
        if layer >= num_hidden_layers and (marked or "input_layernorm.weight" not in inside):
            aside |= {f"{prefix}layers.{layer}.{name}" for name in inside}
    return aside


def _per_expert(stem: str, leaf: str, parameter: str, shape: Shape) -> list[Part]:
    if leaf == "down_proj":
        return [Part(f"{stem}.{e}.down_proj.weight", parameter, (e,)) for e in range(shape[0])]
    width = shape[1] // 2
    halves = (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width)))
    return [
        Part(f"{stem}.{e}.{name}.weight", parameter, (e, at)) for e in range(shape[0]) for name, at in halves
    ]
