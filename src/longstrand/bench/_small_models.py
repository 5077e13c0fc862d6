"""Small models with spread in every weight, packs, and how gradients are compared: for figures and their tests."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.data.pack import Pack
from longstrand.memory import Levers
from longstrand.model import Model, SideLosses, load_model

Mode = Literal["frozen", "sparse", "warmup"]

LENGTHS = (1, 2, 3, 63, 64, 65, 5)
KINDS = {"K": "linear_attention", "D": "indexed_attention"}
MODES: tuple[Mode, ...] = ("frozen", "sparse", "warmup")


def architecture(kinds: str = "KDKD", **changes: Any) -> Architecture:
    """A tiny model: "K" and "D" per layer; the first feed-forward part dense; a second "D" in a row shares."""
    sizes: dict[str, Any] = {
        "vocab_size": 19,
        "hidden_size": 16,
        "intermediate_size": 20,
        "moe_intermediate_size": 8,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "num_attention_heads": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 9,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
        "index_topk": 12,
        "index_kpool": 4,
        "index_n_heads": 16,
        "index_head_dim": 8,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "hc_sinkhorn_iters": 5,
        "swiglu_limit": 1.0,
        "pad_token_id": None,
        "num_hidden_layers": len(kinds),
        "layer_types": [KINDS[kind] for kind in kinds],
        "mlp_layer_types": ["sparse" if index else "dense" for index in range(len(kinds))],
        "indexer_types": [
            "shared" if kinds[max(i - 1, 0) : i + 1] == "DD" else "full" for i in range(len(kinds))
        ],
    }
    return Architecture.from_hf(sizes | changes)


def model(kinds: str = "KDKD", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Model:
    """Slow decay (about 0.99 per token), so that a state that leaks or is lost shows."""
    drawn = load_model(architecture(kinds, **changes), dtype=torch.float64, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, value in [*drawn.named_parameters(), *drawn.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if name.endswith("dt_bias"):
                value.copy_(-6.2 + 0.3 * noise)
            elif name.endswith(("f_a_proj.weight", "f_b_proj.weight")):
                value.mul_(0.5)
            elif name.endswith(("_base", "A_log", "ape", "k_norm.bias", "e_score_correction_bias")):
                value.copy_(0.2 * noise)
            elif value.dim() == 1:
                value.copy_(1 + 0.2 * noise)
            elif name.endswith(("_fn", "compress_gate")):
                value.copy_(noise * value.shape[-1] ** -0.5)
    return drawn.convert(dtype)


def documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 3, vocabulary: int = 19) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def pack(lengths: tuple[int, ...] = LENGTHS, seed: int = 3) -> Pack:
    return Pack.from_documents(documents(lengths, seed))


def losses(given: Pack, indexer: Mode = "sparse") -> SideLosses:
    """The indexer's loss and, beside everything but warm-up, the router's, scaled as for a step of this pack."""
    scale = 0.0 if indexer == "frozen" else 0.7 / max(given.indexer_rows(4), 1)
    return SideLosses(indexer=indexer, indexer_scale=scale, aux_scale=0.0 if indexer == "warmup" else 0.3)


def train_only(trained: Model, *groups: str) -> Model:
    """Freezes all other groups (all groups train when none is named)."""
    names = {name for group, of in trained.groups().items() if not groups or group in groups for name in of}
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(name in names)
    return trained


def upstream(length: int, seed: int = 5) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(
    trained: Model, given: Pack, tile: int, side: SideLosses | None = None, weight: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and every parameter's gradient of their weighted sum (random weights) and the side losses."""
    trained.zero_grad(set_to_none=True)
    logprobs = trained.token_logprobs(given, levers=Levers(tile=tile), side=side)
    weight = upstream(len(given)) if weight is None else weight
    (logprobs * weight.to(logprobs.dtype)).sum().backward()
    found = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    trained.zero_grad(set_to_none=True)
    return logprobs.detach(), found


def largest_difference(
    ours: dict[str, Tensor], truth: dict[str, Tensor], scale: float = 1e-6
) -> tuple[float, str]:
    """Over all names: norm of the difference over max(own norm, scale x largest norm); which name it is."""
    assert ours.keys() == truth.keys(), ours.keys() ^ truth.keys()
    norms = {name: float(value.double().norm()) for name, value in truth.items()}
    least = scale * max(norms.values())
    found = {
        name: float((ours[name].double() - truth[name].double()).norm()) / max(norms[name], least)
        for name in truth
    }
    worst = max(found, key=lambda name: found[name])
    return found[worst], worst
