"""The ops as they are measured: inputs from each op's own cases, our function, its definition, and transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.glm5_next import modeling_glm5_next as theirs
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from longstrand.architecture import Architecture
from longstrand.ops import experts, kda, logprob, mhc, select, short_conv, sparse_attention
from longstrand.ops.experts.cases import ExpertsCase
from longstrand.ops.experts.cases import draw as draw_experts
from longstrand.ops.kda.cases import KdaCase
from longstrand.ops.kda.cases import draw as draw_kda
from longstrand.ops.logprob.cases import LogprobCase
from longstrand.ops.logprob.cases import draw as draw_logprob
from longstrand.ops.mhc.cases import MhcCase
from longstrand.ops.mhc.cases import draw as draw_mhc
from longstrand.ops.norm import gated_rms_norm, rms_norm
from longstrand.ops.select.cases import SelectCase
from longstrand.ops.select.cases import draw as draw_select
from longstrand.ops.short_conv.cases import ConvCase
from longstrand.ops.short_conv.cases import draw as draw_conv
from longstrand.ops.sparse_attention.cases import SparseCase
from longstrand.ops.sparse_attention.cases import draw as draw_sparse
from longstrand.ops.swiglu import swiglu

Inputs = dict[str, Tensor]
Call = Callable[..., Any]

DEPTH = 16_384  # tokens of the document that selecting and attending rows stand at the end of


@dataclass(frozen=True)
class Op:
    """One op.

    Args:
        draw: (shape, tokens of the document, rows at its end) -> inputs in float64.
        ours, definition, theirs: (shape, **inputs) -> outputs; the same outputs in the same order.
        depth: tokens of the document that the timed rows stand in (0: the rows alone).
        short: tokens on which the definition is compared (0: the default).
        learns: whether it has a backward pass.
        seen: (output, **inputs) -> what is compared, where that is not the output itself.
        floor: units of rounding that are always allowed.
    """

    name: str
    draw: Callable[..., Inputs]
    ours: Call
    definition: Call
    theirs: Call | None
    depth: int = 0
    short: int = 0
    learns: bool = True
    seen: Call | None = None
    floor: float = 4.0


def _kda_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    width = shape.linear_head_dim
    case = KdaCase("", tokens, heads=shape.linear_num_heads, key=width, value=width)
    return draw_kda(case) | {
        "state": torch.zeros(1, shape.linear_num_heads, width, width, dtype=torch.float64)
    }


def _kda_theirs(
    _: Architecture, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Any:
    return theirs.chunk_kimi_delta_attention(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def _conv_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    channels = 3 * shape.linear_num_heads * shape.linear_head_dim
    return draw_conv(ConvCase("", (tokens,), before=0, channels=channels, taps=shape.linear_conv_kernel_dim))


def _conv_theirs(_: Architecture, x: Tensor, weight: Tensor, tail: Tensor, offsets: Tensor) -> Tensor:
    return theirs.causal_conv1d_fn(x.mT, weight, activation="silu").mT


def _mhc_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    return draw_mhc(MhcCase("", tokens, shape.hc_mult, shape.hidden_size))


def _mhc(gather: Call, update: Call) -> Call:
    """A whole site, with its input as the sublayer's output."""

    def run(shape: Architecture, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        settings = {
            "norm_eps": shape.rms_norm_eps,
            "eps": shape.hc_eps,
            "iterations": shape.hc_sinkhorn_iters,
        }
        h, post, comb = gather(x, fn, base, scale, **settings)
        return h, update(x, h, post, comb)

    return run


def _mhc_theirs(
    shape: Architecture, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    module = theirs.Glm5NextTextHyperConnection(_config(shape))
    post, comb, h = functional_call(module, {"fn": fn, "base": base, "scale": scale}, (x[None],))
    return h[0], (post.unsqueeze(-1) * h.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x[None]))[0]


def _select_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    """The last rows of a document."""
    pool, heads, width = shape.index_kpool, shape.index_n_heads, shape.index_head_dim
    case = SelectCase(
        "", (tokens,), kpool=pool, num_selected=shape.index_topk // pool, heads=heads, width=width
    )
    drawn = draw_select(case)
    return {name: x if name == "keys" else x[-(rows or tokens) :] for name, x in drawn.items()}


def _select(choose: Call) -> Call:
    return lambda shape, **inputs: choose(**inputs, num_selected=shape.index_topk // shape.index_kpool)


def _chosen_scores(ids: Tensor, q: Tensor, weights: Tensor, keys: Tensor, **_: Tensor) -> Tensor:
    """The scores of the chosen pools, largest first: of near ties either may be chosen."""
    scores = select.pool_scores_reference(q.double(), weights.double(), keys.double())
    chosen = scores.gather(-1, ids.long().clamp(min=0)).masked_fill(ids < 0, 0)
    return chosen.sort(dim=-1, descending=True).values


def _sparse_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    """The last rows of a document, which attend to as many pools as are ever selected."""
    pool = shape.index_kpool
    case = SparseCase(
        "", (tokens,), pool, shape.index_topk // pool, shape.num_attention_heads, shape.kv_lora_rank
    )
    drawn = draw_sparse(case)
    return {name: x if name == "latents" else x[-(rows or tokens) :] for name, x in drawn.items()}


def _sparse(shape: Architecture, q: Tensor, latents: Tensor, pools: Tensor, slots: Tensor) -> Tensor:
    d_latents = torch.zeros_like(latents) if q.requires_grad else None
    settings = {"kpool": shape.index_kpool, "scale": shape.qk_nope_head_dim**-0.5}
    return sparse_attention.sparse_attention(q, latents.detach(), d_latents, pools, slots, **settings)[0]


def _sparse_definition(
    shape: Architecture, q: Tensor, latents: Tensor, pools: Tensor, slots: Tensor
) -> Tensor:
    settings = {"kpool": shape.index_kpool, "scale": shape.qk_nope_head_dim**-0.5}
    return sparse_attention.sparse_attention_reference(q, latents, pools, slots, **settings)[0]


def _sparse_theirs(shape: Architecture, q: Tensor, latents: Tensor, pools: Tensor, slots: Tensor) -> Tensor:
    """A mask over the whole document and dense attention, on latents in place of keys and values of each head."""
    pool = shape.index_kpool
    tokens = (pools.long()[..., None] * pool + torch.arange(pool)).masked_fill(pools[..., None] < 0, -1)
    own = (slots - slots % pool)[:, None] + torch.arange(pool - 1)
    own = own.masked_fill((own > slots[:, None]) | (slots % pool == pool - 1)[:, None], -1)
    stand_in: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    chosen = torch.cat([tokens.flatten(1), own], dim=-1)[None]
    mask = theirs.Glm5NextTextAttention.build_attention_mask_from_topk(stand_in, chosen, q, len(latents))
    keys = latents.expand(1, q.shape[1], *latents.shape)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, keys, attn_mask=mask, scale=shape.qk_nope_head_dim**-0.5
    )
    return out[0].transpose(0, 1)


def _experts_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    active, width, inner = shape.num_experts_per_tok, shape.hidden_size, shape.moe_intermediate_size
    drawn = draw_experts(ExpertsCase("", tokens, shape.n_routed_experts, active, width, inner))
    return drawn | {"gate_up": drawn["gate_up"] * width**-0.5, "down": drawn["down"] * inner**-0.5}


def _experts_theirs(
    shape: Architecture, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    module = _on_meta(theirs.Glm5NextTextExperts, shape)
    return functional_call(module, {"gate_up_proj": gate_up, "down_proj": down}, (x, ids, weights))


def _with_limit(call: Call) -> Call:
    return lambda shape, **inputs: call(**inputs, limit=shape.swiglu_limit)


def _logprob_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    return draw_logprob(LogprobCase("", tokens, shape.vocab_size, shape.hidden_size))


def _logprob_theirs(_: Architecture, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(hidden @ weight.T, targets, reduction="none")


def _swiglu_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    return {"both": 4 * _noise(tokens, 2 * shape.intermediate_size)}


def _swiglu_definition(shape: Architecture, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=shape.swiglu_limit)) * up.clamp(-shape.swiglu_limit, shape.swiglu_limit)


def _swiglu_theirs(shape: Architecture, both: Tensor) -> Tensor:
    stand_in: Any = SimpleNamespace(swiglu_limit=shape.swiglu_limit)
    return theirs.Glm5NextTextExperts._apply_gate(stand_in, both)


def _norm_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    return {"x": _noise(tokens, shape.hidden_size), "weight": 1 + 0.2 * _noise(1, shape.hidden_size, 1)[0]}


def _norm_definition(shape: Architecture, x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt()


def _norm_theirs(shape: Architecture, x: Tensor, weight: Tensor) -> Tensor:
    return functional_call(theirs.Glm5NextTextRMSNorm(1, shape.rms_norm_eps), {"weight": weight}, (x,))


def _gated_inputs(shape: Architecture, tokens: int, rows: int = 0) -> Inputs:
    heads, width = shape.linear_num_heads, shape.linear_head_dim
    x, gate = (_noise(tokens, heads * width, seed).unflatten(-1, (heads, width)) for seed in (0, 1))
    return {"x": x, "gate": gate, "weight": 1 + 0.2 * _noise(1, width, 2)[0]}


def _gated_definition(shape: Architecture, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return _norm_definition(shape, x, weight) * gate.sigmoid()


def _gated_theirs(shape: Architecture, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    module = theirs.Glm5NextTextRMSNormGated(1, shape.rms_norm_eps)
    return functional_call(module, {"weight": weight}, (x, gate))


def _noise(tokens: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _config(shape: Architecture) -> Glm5NextTextConfig:
    config = Glm5NextTextConfig(**shape.to_hf())
    config._experts_implementation = "eager"
    return config


def _on_meta(kind: type[nn.Module], shape: Architecture) -> nn.Module:
    with torch.device("meta"):
        return kind(_config(shape))


def _plain(call: Call) -> Call:
    return lambda shape, **inputs: call(**inputs)


OPS = (
    Op("mhc", _mhc_inputs, _mhc(mhc.mhc_gather, mhc.mhc_update),
       _mhc(mhc.mhc_gather_reference, mhc.mhc_update_reference), _mhc_theirs),
    # Decays between tokens of a chunk are products of factors with exponents up to 20, each rounded by 20 units.
    Op("kda", _kda_inputs, _plain(kda.kda), _plain(kda.kda_reference), _kda_theirs, floor=20.0),
    Op("short_conv", _conv_inputs, lambda shape, **inputs: short_conv.short_conv(**inputs)[0],
       lambda shape, **inputs: short_conv.short_conv_reference(**inputs)[0], _conv_theirs),
    Op("select", _select_inputs, _select(select.select_pools), _select(select.select_pools_reference), None,
       DEPTH, 2304, learns=False, seen=_chosen_scores),
    Op("sparse_attention", _sparse_inputs, _sparse, _sparse_definition, _sparse_theirs, DEPTH, 300),
    Op("experts", _experts_inputs, _with_limit(experts.experts), _with_limit(experts.experts_reference),
       _experts_theirs),
    Op("logprob", _logprob_inputs, _plain(logprob.token_logprobs), _plain(logprob.token_logprobs_reference),
       _logprob_theirs),
    Op("swiglu", _swiglu_inputs, _with_limit(swiglu), _swiglu_definition, _swiglu_theirs),
    Op("norm", _norm_inputs, lambda shape, x, weight: rms_norm(x, weight, shape.rms_norm_eps),
       _norm_definition, _norm_theirs),
    Op("gated norm", _gated_inputs,
       lambda shape, x, gate, weight: gated_rms_norm(x, gate, weight, shape.rms_norm_eps),
       _gated_definition, _gated_theirs),
)  # fmt: skip
