"""`longstrand audit`: what each layer was planned to run in, and what one real step of it ran."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console

from longstrand import hf_config_keys as keys
from longstrand.architecture import Architecture
from longstrand.checks.audit_table import show_audit
from longstrand.checks.mismatches import Mismatch, mismatches
from longstrand.checks.observing import Observer
from longstrand.checks.sample import num_tokens, packs_of, short_pack
from longstrand.config import Recipe
from longstrand.data import Loader, Pack
from longstrand.errors import CheckFailed, UserError
from longstrand.memory import Levers
from longstrand.model import Model, SideLosses
from longstrand.model.forms import plan_forms
from longstrand.model.hf import read_json
from longstrand.ops.native import name_of
from longstrand.train.forms import pass_of, record_of
from longstrand.train.run_folder import resolve_recipe
from longstrand.train.sft import prepare
from longstrand.trained import model_source

TOKENS = 385
TRIES = 16
"""Sequences that are looked through for one with a target in its first tokens."""


@dataclass(frozen=True)
class Audit:
    """What was planned, what ran, and where they differ.

    Attributes:
        record: as kernels.json, with what was seen of each layer.
        silent: names of sizes that config.json leaves to their defaults.
    """

    record: dict[str, Any]
    mismatches: list[Mismatch]
    silent: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        found = [each.as_dict() for each in self.mismatches]
        silent = list(self.silent)
        return {"passed": not found, "mismatches": found, "config_is_silent_on": silent, **self.record}


def run_audit(recipe: Recipe, *, as_json: bool = False) -> None:
    """Audits a recipe and prints what was found; writes no file.

    Raises:
        CheckFailed: something ran that was not planned or asked, with layer, op and remedy.
    """
    found = audit(recipe)
    if as_json:
        Console(soft_wrap=True).out(json.dumps(found.as_dict(), indent=1), highlight=False)
    else:
        show_audit(found.as_dict())
    if found.mismatches:
        more = len(found.mismatches) - 1
        raise CheckFailed(f"{found.mismatches[0]}" + f"; and {more} more" * (more > 0))


def audit(recipe: Recipe) -> Audit:
    """Plans the recipe's training pass, makes one short step forward and back, and compares.

    The plan is that of the sizes in config.json as they are written there, whatever the model was made of.

    Raises:
        UserError: the recipe or its inputs cannot be used.
    """
    resolved = resolve_recipe(recipe)
    prepared = prepare(resolved)
    model = prepared.model
    source = model_source(resolved.model)
    written = written_sizes(read_json(source / "config.json" if source.is_dir() else source))
    shape = replace(model.architecture, **written)  # type: ignore[arg-type]
    plan = plan_forms(shape, pass_of(resolved, model))
    observer = Observer(model)
    pack = _short_pack(prepared.loader)
    with observer.watching():
        _step(resolved, model, pack)
    found = mismatches(plan, observer.ops, model, resolved.kernels.require)
    record = record_of(resolved, plan) | {"observed": {"tokens": len(pack), **_observed(observer)}}
    model.zero_grad(set_to_none=True)
    return Audit(record, found, model.architecture.defaulted)


def written_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The whole numbers of an `Architecture` that a config.json holds, read apart from how a model is made of it."""
    text = config.get("text_config") or config
    linear = text.get("linear_attn_config") or {}
    values = {new: linear[old] for old, new in keys.LINEAR.items() if old in linear}
    if "num_local_experts" in text:
        values["n_routed_experts"] = text["num_local_experts"]
    values |= text
    names = [f.name for f in fields(Architecture) if f.type == "int"]
    return {name: values[name] for name in names if isinstance(values.get(name), int)}


def _observed(observer: Observer) -> dict[str, Any]:
    """Ops by layer, and how many weights and gradients have which dtype."""
    weights = list(observer.model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return {
        "weights": dict(Counter(name_of(each.dtype) for each in weights)),
        "gradients": dict(Counter(name_of(each.dtype) for each in gradients)),
        "layers": [
            {"layer": at, "ops": [op.as_dict() for op in ops.values()]} for at, ops in observer.ops.items()
        ],
        "cuda_kernels": dict(observer.cuda),
    }


def _short_pack(loader: Loader) -> Pack:
    """The first tokens of a sequence that has a target among them."""
    for _ in range(TRIES):
        documents = short_pack(loader, TOKENS)
        if num_tokens((documents,)) and any(any(document.weights[1:]) for document in documents):
            return packs_of((documents,))[0]
    raise UserError(
        f"data.sources: the first {TOKENS} tokens of {TRIES} sequences have no target with a weight, so there is "
        "nothing to walk back from; give other data, or look at data.n and data.case"
    )


def _step(recipe: Recipe, model: Model, pack: Pack) -> None:
    """Forward and back as in training, without an optimizer; the gradients stay."""
    settings = recipe.train
    rows = max(pack.indexer_rows(model.architecture.index_kpool), 1)
    side = SideLosses(
        indexer=settings.indexer,
        indexer_scale=settings.indexer_weight / rows,
        aux_scale=settings.balance_rate if settings.balance == "aux" else 0.0,
    )
    levers = Levers(tile=recipe.memory.tile, recompute=recipe.memory.recompute)
    logprobs = model.token_logprobs(pack, levers=levers, side=side)
    (-(logprobs * pack.weight.to(logprobs)).sum() / pack.weight.sum().to(logprobs)).backward()
