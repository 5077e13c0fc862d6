"""The mutations figure: what runs but is wrong must show, and show for that reason alone.

Each clause names one way to get the model wrong. The product is run as it is, with the clause's definition put in
its place, and with the definition wrong in that one point; all three are compared with transformers. The first two
must agree with it (so that nothing but the clause differs), the third must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from longstrand.architecture import Architecture
from longstrand.bench import _wrong as wrong
from longstrand.bench._arguments import command_line, one_of
from longstrand.bench._small_models import architecture, documents, model
from longstrand.bench.figures import show
from longstrand.bench.oracle import Oracle
from longstrand.data.pack import Pack
from longstrand.memory import Levers
from longstrand.model import Model, load_model

Patch = Callable[[bool], AbstractContextManager[Any]]
Form = Literal["product", "definition", "wrong"]


@dataclass(frozen=True)
class Clause:
    """One way to be wrong.

    Attributes:
        patch: puts the definition in the product's place, wrong in this one point or not.
        sizes: changes to the small model's architecture.
        prepare: weights under which the clause has an effect.
        tokens: documents; random ones of `lengths` where not given.
        config: makes the config that both sides read; the model's own where not given.
        limit, effect: the most that right forms may differ from the oracle, the least that the wrong one must.
    """

    patch: Patch
    sizes: Mapping[str, Any] = field(default_factory=dict)
    kinds: str = "KDKD"
    lengths: tuple[int, ...] = (37, 6)
    tile: int = 16
    prepare: Callable[[Model], None] = lambda _: None
    tokens: Callable[[], list[Tensor]] | None = None
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    dtype: torch.dtype = torch.float64
    limit: float = 1e-9
    effect: float = 1e-3


def difference(name: str, form: Form) -> float:
    """Largest difference of log-probabilities to transformers; infinite where one is not finite."""
    clause = CLAUSES[name]
    weights, truth, raw = _oracle(name)
    given = Pack.from_documents(_documents(clause))
    with nullcontext() if form == "product" else clause.patch(form == "wrong"), torch.no_grad():
        ours = load_model(Architecture.from_hf(raw), dtype=clause.dtype)
        for key, value in [*ours.named_parameters(), *ours.named_buffers()]:
            if (
                key in weights and weights[key].shape == value.shape
            ):  # a config read wrongly has other tensors
                value.copy_(weights[key])
        ours.layers[-1].is_last = True  # type: ignore[assignment]  # read by `_wrong.stream_head`
        found = ours.token_logprobs(given, levers=Levers(tile=clause.tile)).double()
    largest = float((found - truth).abs().max())
    return largest if found.isfinite().all() else float("inf")


def judge(name: str) -> dict[str, Any]:
    """The clause's three differences, and whether they are as they must be."""
    clause = CLAUSES[name]
    found = {form: difference(name, form) for form in ("product", "definition", "wrong")}
    right = max(found["product"], found["definition"])
    return {
        "name": name,
        "asked": f"<= {clause.limit:g}, >= {clause.effect:g}",
        "measured": f"{right:.1e}, {found['wrong']:.2g}",
        "pass": right <= clause.limit and found["wrong"] >= clause.effect,
        "detail": found,
    }


def measure() -> list[dict[str, Any]]:
    """One record per clause."""
    return [judge(name) for name in CLAUSES]


def main(arguments: list[str]) -> int:
    """`longstrand bench mutations [CLAUSE ...]`."""
    options_of = command_line("mutations", __doc__)
    options_of.add_argument(
        "clauses", type=one_of(CLAUSES), nargs="*", metavar="CLAUSE", help="by default all of them"
    )
    return show([judge(name) for name in options_of.parse_args(arguments).clauses or CLAUSES])


@cache
def _oracle(name: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Weights, transformers' log-probabilities (each document alone), and the config as both sides read it."""
    clause = CLAUSES[name]
    shape = architecture(clause.kinds, **clause.sizes)
    raw = clause.config(shape.to_hf()) if clause.config else shape.to_hf()
    theirs = Architecture.from_hf(Glm5NextTextConfig(**raw).to_dict())  # as transformers resolves it
    drawn = model(clause.kinds, **{**clause.sizes, **_resolved(theirs)})
    with torch.no_grad():
        clause.prepare(drawn)
    drawn.convert(clause.dtype)
    weights = {key: value.detach() for key, value in [*drawn.named_parameters(), *drawn.named_buffers()]}
    return weights, Oracle(theirs, weights).run(_documents(clause)).logprobs, raw


def _resolved(theirs: Architecture) -> dict[str, Any]:
    return {"mlp_layer_types": list(theirs.mlp_layer_types), "index_kpool": theirs.index_kpool}


def _documents(clause: Clause) -> list[Tensor]:
    return clause.tokens() if clause.tokens else documents(clause.lengths)


def _without(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {key: value for key, value in config.items() if key not in keys}


def _plain_pools(drawn: Model) -> None:
    for name, value in drawn.named_parameters():
        if name.endswith("index_kpool_compress_ape"):
            value.zero_()


def _scaled(factor: float, *endings: str) -> Callable[[Model], None]:
    def prepare(drawn: Model) -> None:
        for name, value in drawn.named_parameters():
            if name.endswith(endings):
                value.mul_(factor)

    return prepare


CLAUSES: dict[str, Clause] = {
    "kpool left at the class default": Clause(wrong.kpool, prepare=_plain_pools, lengths=(61,)),
    "one dense layer instead of three": Clause(
        wrong.dense_layers, kinds="KDKDK", config=_without("mlp_layer_types"), lengths=(19,)
    ),
    "gate as a clamp": Clause(wrong.gate),
    "clamp after silu": Clause(wrong.clamp_after_silu, {"swiglu_limit": 0.4}),
    "a minimum on the gate": Clause(wrong.gate_minimum, {"swiglu_limit": 0.4}),
    "mHC norm as 1/(rms + eps)": Clause(
        wrong.mhc_norm, {"rms_norm_eps": 1e-4}, kinds="KD", prepare=_scaled(0.02, "embed_tokens.weight")
    ),
    "rows before columns in Sinkhorn": Clause(wrong.sinkhorn_order, {"hc_sinkhorn_iters": 2}),
    "comb not transposed": Clause(wrong.comb_transposed),
    "a learned stream head": Clause(wrong.stream_head),
    "pools crossing packed documents": Clause(wrong.crossing_pools, lengths=(26, 3, 41), tile=64),
    "a pool selectable by its first token": Clause(wrong.early_pools, tile=64),
    "the tail pool left out": Clause(wrong.no_tail),
    "-1 clamped to 0 and attended": Clause(wrong.clamped_ids, lengths=(5, 9, 30)),
    "packed documents ignored": Clause(wrong.one_document, lengths=(26, 3, 17)),
    "l2norm as F.normalize": Clause(
        wrong.normalise, prepare=_scaled(0.02, "q_conv1d.weight", "k_conv1d.weight")
    ),
    "correction bias inside the expert weights": Clause(wrong.biased_weights),
    "a zig-zag layout fed to a contiguous scan": Clause(wrong.zigzag, lengths=(64,)),
    "a wrong row offset in chunked scoring": Clause(wrong.row_offset, lengths=(67,), tile=64),
    "a chunk inverse by doubling": Clause(
        wrong.doubling,
        kinds="K",
        sizes={"linear_num_heads": 4},
        tile=64,
        prepare=_scaled(30.0, "b_proj.weight"),
        tokens=lambda: [torch.full((130,), 7)],
        dtype=torch.float32,
        limit=1e-4,
        effect=1e-2,
    ),
}
