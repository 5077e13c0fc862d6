"""The figure of what ranks exchange: every collective of a pass, counted, at the widths of the released model.

    longstrand bench exchanged

One KDA and one DSA layer of GLM-5.3-Flash's widths in bfloat16, with few experts and a small vocabulary, which are not
exchanged here: 2 and 4 gloo processes share one document of 512 and of 1,024 tokens. Every exchange is recorded with
its label and the shape of its rows, forward and backward apart. The indexer learns, so that all there is moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.bench import _small_models as small
from longstrand.bench._arguments import command_line
from longstrand.bench._steps import random_pack
from longstrand.bench.figures import show
from longstrand.memory import Levers
from longstrand.model import Model, SideLosses, load_model
from longstrand.model.parallelize import parallelize
from longstrand.ops.native import use_native
from longstrand.parallel import Axis, make_mesh, run_ranks

LENGTHS = (512, 1024)
RANKS = (2, 4)
TILE = 128
LIMIT = 1.1 * 1024  # bytes per token of the whole sequence and DSA layer
PHASES = ("forward", "backward")
# Of GLM-5.3-Flash; layers, experts, feed-forward and vocabulary are few and small, and move nowhere here.
REAL = {
    "vocab_size": 256,
    "hidden_size": 4096,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
    "index_topk": 256,
    "index_kpool": 4,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "swiglu_limit": 10.0,
}
WHAT = {
    "KDA convolution inputs": "q, k, v before the convolution: 3 rows before each segment",
    "KDA convolution input gradients": "of those rows",
    "KDA summaries": "[A | B] of each head and segment",
    "KDA states": "the state that each head of a segment enters",
    "KDA state gradients": "of those states, there and back",
    "DSA halo": "latent, key and gate: 3 rows before each segment",
    "DSA halo gradients": "of those rows",
    "DSA latents": "the latent of every token",
    "DSA pool keys": "a key per complete pool of 4 tokens",
    "DSA latent gradients": "of the latents, summed",
    "DSA pool key gradients": "of the pool keys, summed",
}
COLUMNS = (
    "pass",
    "what",
    "a row",
    "of",
    *(f"bytes at {length:,} tokens" for length in LENGTHS),
    "more per token",
)


@dataclass
class Exchange:
    """All exchanges of one label in one phase.

    Attributes:
        row: shape of a row, without the number of rows.
        received: bytes that came from other ranks.
        held: those and this rank's own: what it has of all ranks.
    """

    row: tuple[int, ...]
    dtype: str
    received: int = 0
    held: int = 0


Counts = dict[tuple[str, str], Exchange]
"""By phase and label."""


def measure() -> list[dict[str, Any]]:
    """For 2 and 4 ranks: what DSA and KDA exchange, and what is in a row."""
    use_native("auto")
    model = drawn_model(Architecture.from_hf(REAL | layers_of("KD")))
    return [record for ranks in RANKS for record in judge(model, ranks, LENGTHS, TILE)]


def layers_of(kinds: str) -> dict[str, Any]:
    """The keys that say which layers a model has."""
    shape = small.architecture(kinds)
    names = ("layer_types", "mlp_layer_types", "indexer_types", "num_hidden_layers", "pad_token_id")
    return {name: getattr(shape, name) for name in names}


def drawn_model(shape: Architecture) -> Model:
    """In bfloat16; norms and indexers train, so that gradients pass every layer and few are held."""
    return small.train_only(load_model(shape, torch.bfloat16, seed=0), "norms", "indexer")


def judge(model: Model, ranks: int, lengths: Sequence[int], tile: int) -> list[dict[str, Any]]:
    """The records of one number of ranks, from a pass at each of two lengths."""
    found = {length: count(model, ranks, length, tile) for length in lengths}
    short, long = (found[length] for length in lengths)
    table = {"columns": list(COLUMNS), "rows": [_row(key, short, long, lengths) for key in long]}
    counts = {
        f"{phase}: {what}": {str(length): vars(found[length][phase, what]) for length in lengths}
        for phase, what in long
    }
    records = [
        _dsa_record(found, ranks),
        _kda_record(found, ranks),
        _rows_record(short, long, (model.architecture, ranks)),
    ]
    records[0]["detail"] |= (
        {"exchanges": counts, "table": table} if ranks == RANKS[-1] else {"exchanges": counts}
    )
    return records


def count(model: Model, ranks: int, length: int, tile: int) -> Counts:
    """What is exchanged in a pass forward and backward, of the rank to which most comes."""
    every = run_ranks(ranks, recorded, model, length, tile, start="fork", timeout=600)
    most: Counts = {}
    for counts in every:
        for key, each in counts.items():
            kept = most.setdefault(key, Exchange(each.row, each.dtype))
            kept.received, kept.held = max(kept.received, each.received), max(kept.held, each.held)
    return most


def recorded(model: Model, length: int, tile: int) -> Counts:
    """Of one rank; to be called on all."""
    mesh = make_mesh(data=1, context=torch.distributed.get_world_size(), expert=1)
    parallelize(model, mesh, shard=False)
    pack = random_pack(length, model.architecture.vocab_size)
    rows = max(pack.indexer_rows(model.architecture.index_kpool), 1)
    side = SideLosses(indexer="sparse", indexer_scale=1.0 / rows)
    counts: Counts = {}
    with watched((mesh.context, mesh.world), counts, "forward"):
        logprobs = model.token_logprobs(pack, levers=Levers(tile=tile), side=side)
    with watched((mesh.context, mesh.world), counts, "backward"):
        (-logprobs.sum() / length).backward()
    return counts


@contextmanager
def watched(axes: Sequence[Axis], counts: Counts, phase: str) -> Iterator[None]:
    """Records every exchange of these axes."""
    with ExitStack() as patches:
        for axis in axes:
            for name in ("gather", "scatter_sum", "exchange", "sum"):
                patches.enter_context(patch.object(axis, name, _watch(axis, name, counts, phase)))
        yield


def _watch(axis: Axis, name: str, counts: Counts, phase: str) -> Callable[..., Tensor]:
    own = getattr(axis, name)

    def call(x: Tensor, *arguments: Any) -> Tensor:
        what = arguments[-1] if arguments else "sums"
        before = axis.received[what]
        given = x.nbytes
        out: Tensor = own(x, *arguments)
        row = tuple(out.shape[1:])
        each = counts.setdefault((phase, what), Exchange(row, str(out.dtype).removeprefix("torch.")))
        if each.row != row:
            raise AssertionError(f"{what}: rows of {each.row} and of {row} under one label")
        each.received += axis.received[what] - before
        each.held += given if name == "scatter_sum" else out.nbytes
        return out

    return call


def hidden_rows(shape: Architecture) -> set[tuple[int, ...]]:
    """What a row that is a hidden state, a query or one of its parts would look like."""
    width, streams = shape.hidden_size, shape.hc_mult
    heads, kda = shape.num_attention_heads, shape.linear_num_heads
    inner = {
        (heads, shape.qk_nope_head_dim),
        (heads, shape.v_head_dim),
        (heads, shape.kv_lora_rank),
        (kda, shape.linear_head_dim),
        (shape.index_n_heads, shape.index_head_dim),
        (streams, width),
    }
    return inner | {(a * b,) for a, b in inner} | {(width,), (shape.q_lora_rank,), (shape.qk_nope_head_dim,)}


def _dsa_record(found: Mapping[int, Counts], ranks: int) -> dict[str, Any]:
    """What a rank holds of all ranks, and the rows before its segments, which do not depend on the length."""
    gathered = {
        length: (counts["forward", "DSA latents"].held + counts["forward", "DSA pool keys"].held) / length
        for length, counts in found.items()
    }
    halo = {length: counts["forward", "DSA halo"].received for length, counts in found.items()}
    passes = all(value <= LIMIT for value in gathered.values()) and len(set(halo.values())) == 1
    return {
        "name": f"DSA forward, bytes per token of the whole sequence and layer, {ranks} ranks",
        "asked": {"latents and pool keys of all ranks": f"<= {LIMIT:,.1f}", "halo, bytes in all": "the same"},
        "measured": {
            "latents and pool keys of all ranks": _each(gathered, "{:,.1f}"),
            "halo, bytes in all": _each(halo, "{:,}"),
        },
        "pass": passes,
        "detail": {"gathered": gathered, "halo": halo},
    }


def _kda_record(found: Mapping[int, Counts], ranks: int) -> dict[str, Any]:
    received = {
        phase: {
            length: sum(each.received for (p, what), each in counts.items() if p == phase and "KDA" in what)
            for length, counts in found.items()
        }
        for phase in PHASES
    }
    return {
        "name": f"KDA, bytes received per layer, {ranks} ranks",
        "asked": dict.fromkeys(PHASES, "independent of length"),
        "measured": {phase: _each(received[phase], "{:,}") for phase in PHASES},
        "pass": all(len(set(each.values())) == 1 and min(each.values()) > 0 for each in received.values()),
        "detail": {"received": received},
    }


def _rows_record(short: Counts, long: Counts, of: tuple[Architecture, int]) -> dict[str, Any]:
    """No row is a hidden state or a query, and nothing but latents and pool keys grows with the length."""
    shape, ranks = of
    wrong = sorted(what for (_, what), each in long.items() if each.row in hidden_rows(shape))
    unknown = sorted(what for _, what in long if what not in WHAT)
    growing = sorted({what for key, each in long.items() for what in key[1:] if each.held > short[key].held})
    few = sorted(["DSA latents", "DSA pool keys", "DSA latent gradients", "DSA pool key gradients"])
    return {
        "name": f"what ranks exchange, {ranks} ranks",
        "asked": {"rows that are hidden states or queries": "none", "grows with the length": ", ".join(few)},
        "measured": {
            "rows that are hidden states or queries": ", ".join(wrong) or "none",
            "grows with the length": ", ".join(growing),
        },
        "pass": not wrong and not unknown and set(growing) <= set(few),
        "detail": {"labels": {what: WHAT.get(what, "unknown") for _, what in long}, "unknown": unknown},
    }


def _row(key: tuple[str, str], short: Counts, long: Counts, lengths: Sequence[int]) -> list[str]:
    phase, what = key
    each = long[key]
    more = (each.held - short[key].held) / (lengths[1] - lengths[0])
    row = " x ".join(map(str, each.row)) or "a number"
    sizes = [f"{counts[key].received:,}" for counts in (short, long)]
    return [phase, f"{what}: {WHAT.get(what, 'unknown')}", row, each.dtype, *sizes, f"{more:,.1f}"]


def _each(values: Mapping[int, float], form: str) -> str:
    return ", ".join(f"{form.format(value)} at {length:,}" for length, value in values.items())


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench exchanged`."""
    command_line("exchanged", __doc__).parse_args(list(arguments))
    torch.set_num_threads(1)
    return show(measure())
