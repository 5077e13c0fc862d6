"""The whole model written as its formulas: one document at a time, full matrices, no tiles, autograd throughout.

It takes our parameters by name and serves where transformers has no answer: the indexer's loss and the auxiliary one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstrand.model import Model
from longstrand.ops.indexer_loss import indexer_loss_reference
from longstrand.ops.kda import kda_reference
from longstrand.ops.mhc import mhc_gather_reference, mhc_update_reference
from longstrand.ops.select import pool_scores_reference
from longstrand.ops.short_conv import short_conv_reference


@dataclass
class Plain:
    """What one pass over all documents gives.

    Attributes:
        indexer_kl: sum over rows and DSA layers, nats.
        router_logits: per MoE layer, [tokens, E] per document.
    """

    parameters: dict[str, Tensor]
    logprobs: list[Tensor] = field(default_factory=list)
    indexer_kl: Tensor | float = 0.0
    router_logits: dict[int, list[Tensor]] = field(default_factory=dict)
    expert_ids: dict[int, list[Tensor]] = field(default_factory=dict)

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: leaf.grad for name, leaf in self.parameters.items()}

    def aux_loss(self) -> Tensor:
        """transformers' `load_balancing_loss_func`, the experts' shares from the choices really made."""
        logits = torch.cat([each for layer in self.router_logits.values() for each in layer])
        chosen = torch.cat([each for layer in self.expert_ids.values() for each in layer])
        num_experts = logits.shape[-1]
        share = torch.nn.functional.one_hot(chosen, num_experts).double().mean(0)  # A E
        return num_experts * (share * logits.softmax(-1).mean(0)).sum()


def run(model: Model, documents: list[Tensor], indexer: str = "frozen") -> Plain:
    """Log-probabilities (and side losses) of each document alone, in float64; call `.backward()` on what you like."""
    named = [*model.named_parameters(), *model.named_buffers()]
    parameters = {name: value.detach().double().clone().requires_grad_() for name, value in named}
    plain = Plain(parameters)
    for document in documents:
        _run_document(plain, model, document, indexer)
    return plain


def _run_document(plain: Plain, model: Model, document: Tensor, indexer: str) -> None:
    shape, p = model.architecture, plain.parameters
    x = p["embed_tokens.weight"][document].unsqueeze(1).repeat(1, shape.hc_mult, 1)
    pools = None
    for index, kind in enumerate(shape.layer_types):
        layer = _Named(p, f"layers.{index}.")
        h, post, comb = _enter(layer, shape, x, "attn", "input_layernorm")
        if kind == "linear_attention":
            out = _kda(layer.at("self_attn."), shape, h)
        else:
            out, pools, loss = _dsa(layer.at("self_attn."), shape, h, pools, indexer, index)
            plain.indexer_kl = plain.indexer_kl + loss
        x = mhc_update_reference(x, out, post, comb)
        h, post, comb = _enter(layer, shape, x, "ffn", "post_attention_layernorm")
        x = mhc_update_reference(x, _feed_forward(plain, layer.at("mlp."), shape, h, index), post, comb)
    hidden = _rms_norm(x.mean(1), p["norm.weight"], shape.rms_norm_eps)
    head = p.get("lm_head.weight", p["embed_tokens.weight"])
    logits = (hidden @ head.T).log_softmax(-1)
    scores = logits[:-1].gather(-1, document[1:, None])[:, 0]
    plain.logprobs.append(torch.cat([scores, scores.new_zeros(1)]))


class _Named:
    """Parameters below a prefix."""

    def __init__(self, parameters: dict[str, Tensor], prefix: str) -> None:
        self.parameters, self.prefix = parameters, prefix

    def at(self, name: str) -> _Named:
        return _Named(self.parameters, self.prefix + name)

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.parameters

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self[f"{name}.weight"].T


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def _enter(layer: _Named, shape, x: Tensor, site: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
    fn, base, scale = (layer[f"hc_{site}_{part}"] for part in ("fn", "base", "scale"))
    eps = {"norm_eps": shape.rms_norm_eps, "eps": shape.hc_eps, "iterations": shape.hc_sinkhorn_iters}
    h, post, comb = mhc_gather_reference(x, fn, base, scale, **eps)
    return _rms_norm(h, layer[f"{norm}.weight"], shape.rms_norm_eps), post, comb


def _kda(layer: _Named, shape, h: Tensor) -> Tensor:
    heads, width, taps = shape.linear_num_heads, shape.linear_head_dim, shape.linear_conv_kernel_dim
    offsets, mixed = torch.arange(len(h)), []
    for name in "qkv":
        x = layer.linear(f"{name}_proj", h)
        tail = x.new_zeros(1, taps - 1, heads * width)
        x, _ = short_conv_reference(x[None], layer[f"{name}_conv1d.weight"].squeeze(1), tail, offsets)
        mixed.append(x.unflatten(-1, (heads, width)))
    raw = layer.linear("f_b_proj", layer.linear("f_a_proj", h)) + layer["dt_bias"]
    rate = layer["A_log"].exp()[:, None]
    decay = shape.linear_lower_bound * torch.sigmoid(rate * raw.unflatten(-1, (heads, width)))
    beta = layer.linear("b_proj", h).sigmoid()
    state = h.new_zeros(1, heads, width, width)
    out, _ = kda_reference(*mixed, decay[None], beta[None], state)
    gate = layer.linear("g_b_proj", layer.linear("g_a_proj", h)).unflatten(-1, (heads, width))
    out = _rms_norm(out[0], layer["o_norm.weight"], shape.rms_norm_eps) * gate.sigmoid()
    return layer.linear("o_proj", out.flatten(-2))


def _dsa(layer: _Named, shape, h: Tensor, before, indexer: str, index: int):
    """Keys and values are formed per head, and each row attends under a mask."""
    heads, qk, v = shape.num_attention_heads, shape.qk_nope_head_dim, shape.v_head_dim
    length, kpool = len(h), shape.index_kpool
    q_resid = _rms_norm(layer.linear("q_a_proj", h), layer["q_a_layernorm.weight"], shape.rms_norm_eps)
    queries = layer.linear("q_b_proj", q_resid).unflatten(-1, (heads, qk))
    latents = layer.linear("kv_a_proj_with_mqa", h)
    latents = _rms_norm(latents, layer["kv_a_layernorm.weight"], shape.rms_norm_eps)
    keys, values = layer.linear("kv_b_proj", latents).unflatten(-1, (heads, qk + v)).split([qk, v], dim=-1)
    full = shape.indexer_types[index] == "full"
    scores = _index_scores(layer.at("indexer."), shape, h.detach(), q_resid.detach()) if full else None
    complete = (torch.arange(length) + 1) // kpool
    visible = torch.arange(length // kpool) < complete[:, None]  # T P
    pools = visible if indexer == "warmup" else _selected(scores, visible, shape) if full else before
    tokens = torch.arange(length)
    hidden = ~torch.nn.functional.pad(pools.repeat_interleave(kpool, -1), (0, length % kpool))
    hidden &= ~((tokens >= complete[:, None] * kpool) & (tokens <= tokens[:, None]))  # the open pool
    products = torch.einsum("thd,shd->ths", queries, keys) * qk**-0.5
    probabilities = products.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
    out = torch.einsum("ths,shd->thd", probabilities, values)
    loss = h.new_zeros(())
    if full and indexer != "frozen" and length >= kpool:
        mass = probabilities.detach().sum(1)[:, : length // kpool * kpool].unflatten(-1, (-1, kpool)).sum(-1)
        mass = mass * pools  # a row's open pool has none, although a later row may see it complete
        total = mass.sum(-1, keepdim=True)
        loss = indexer_loss_reference(scores, torch.where(total > 0, mass / total, 0), pools).sum()
    return layer.linear("o_proj", out.flatten(-2)), pools, loss


def _index_scores(layer: _Named, shape, h: Tensor, q_resid: Tensor) -> Tensor:
    q = layer.linear("wq_b", q_resid).unflatten(-1, (shape.index_n_heads, shape.index_head_dim))
    weights = layer.linear("weights_proj", h) * shape.index_n_heads**-0.5
    keys = layer.linear("wk", h)
    norm = layer["k_norm.weight"], layer["k_norm.bias"]
    keys = torch.nn.functional.layer_norm(keys, norm[0].shape, *norm, 1e-6)
    gates = h @ layer["index_kpool_compress_gate"].T
    num_pools = len(h) // shape.index_kpool
    whole = num_pools * shape.index_kpool
    shape_of_pools = (num_pools, shape.index_kpool)
    shares = gates[:whole].unflatten(0, shape_of_pools) + layer["index_kpool_compress_ape"]
    pooled = (shares.softmax(1) * keys[:whole].unflatten(0, shape_of_pools)).sum(1)
    return pool_scores_reference(q, weights, pooled)


def _selected(scores: Tensor, visible: Tensor, shape) -> Tensor:
    """[T, P]: the visible pools with the highest scores, ties to the lowest id."""
    selected = torch.zeros_like(visible)
    for t, row in enumerate(scores.tolist()):
        candidates = visible[t].nonzero()[:, 0].tolist()
        best = sorted(candidates, key=lambda pool: (-row[pool], pool))
        selected[t, best[: shape.index_topk // shape.index_kpool]] = True
    return selected


def _feed_forward(plain: Plain, layer: _Named, shape, h: Tensor, index: int) -> Tensor:
    if shape.mlp_layer_types[index] == "dense":
        return _swiglu(layer, shape, h)
    logits = layer.linear("gate", h)
    scores = logits.sigmoid()
    chosen = (scores + layer["gate.e_score_correction_bias"]).topk(shape.num_experts_per_tok).indices
    plain.router_logits.setdefault(index, []).append(logits)
    plain.expert_ids.setdefault(index, []).append(chosen)
    weights = scores.gather(-1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor
    gate_up = torch.einsum("td,taed->tae", h, layer["experts.gate_up_proj"][chosen])
    gate, up = gate_up.chunk(2, dim=-1)
    limit = shape.swiglu_limit
    inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    out = torch.einsum("ta,taf,tadf->td", weights, inner, layer["experts.down_proj"][chosen])
    return out + _swiglu(layer.at("shared_experts."), shape, h)


def _swiglu(layer: _Named, shape, h: Tensor) -> Tensor:
    limit = shape.swiglu_limit
    gate, up = layer.linear("gate_proj", h), layer.linear("up_proj", h)
    hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return layer.linear("down_proj", hidden)
