"""Floating-point operations that a training step of a model needs: products only, two per multiply and add.

What counts is the definition, not our way to compute it: the delta rule token by token (not the chunk's extra work),
the active experts, the selected tokens, and no recompute. Elementwise work (norms, activations, gates, the
convolution's four taps, Sinkhorn, softmax, top-k) is left out on purpose: it makes our share of the peak smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from longstrand.architecture import KDA, Architecture

Kind = Literal["projections", "experts", "delta rule", "attention", "scores", "streams", "head"]
"""What is computed alike, and so reaches a like part of a device's rate."""


@dataclass(frozen=True)
class Products:
    """Operations per token of one forward pass.

    Args:
        name: what is computed, with its dims.
        forward: operations per token.
        learns: whether the backward pass has two more of each product: three passes in all, else one.
        grows: whether it grows with the length for ever (the scores of all visible pools).
    """

    name: str
    forward: float
    kind: Kind
    learns: bool = True
    grows: bool = False

    @property
    def step(self) -> float:
        """Forward and backward."""
        return self.forward * (3 if self.learns else 1)

    @property
    def walked(self) -> float:
        """Forward and backward as a scan over tiles computes them: what learns is recomputed once."""
        return self.forward * (4 if self.learns else 1)


def terms(shape: Architecture, length: int) -> list[Products]:
    """All terms of one document of `length` tokens, means over its tokens; the indexer is frozen."""
    found: dict[Products, int] = {}
    for index, kind in enumerate(shape.layer_types):
        mixer = kda_terms(shape) if kind == KDA else dsa_terms(shape, length, shape.indexer_types[index])
        for term in [*mixer, *feed_forward_terms(shape, shape.mlp_layer_types[index]), *mhc_terms(shape)]:
            found[term] = found.get(term, 0) + 1
    layers = [
        replace(term, name=f"{term.name}, {count} x", forward=term.forward * count)
        for term, count in found.items()
    ]
    head = 2 * shape.hidden_size * shape.vocab_size
    return [*layers, Products(f"head {shape.hidden_size} x {shape.vocab_size}", head, "head")]


def step_flops(shape: Architecture, length: int) -> float:
    """Operations per token of forward and backward."""
    return sum(term.step for term in terms(shape, length))


def kda_terms(shape: Architecture) -> list[Products]:
    """A linear-attention mixer: projections, and the delta rule's three products per head with a state [K, V].

    Per token and head: S^T k, k (v - S^T k)^T and S^T q, 2 K V each.
    """
    width, heads, head = shape.hidden_size, shape.linear_num_heads, shape.linear_head_dim
    inner = heads * head
    gates = 2 * (2 * width * head + 2 * head * inner) + 2 * width * heads
    return [
        Products(f"KDA q, k, v, o {width} x {inner}", 4 * 2 * width * inner, "projections"),
        Products(
            f"KDA decay and gate {width} x {head} x {inner}, beta {width} x {heads}", gates, "projections"
        ),
        Products(
            f"KDA state {heads} x {head} x {head}: read, update, read",
            heads * 3 * 2 * head * head,
            "delta rule",
        ),
    ]


def dsa_terms(shape: Architecture, length: int, indexer: str) -> list[Products]:
    """A sparse-attention mixer in latent space, where keys and values of the selected tokens are never formed.

    Per token: queries H x qk into the latent (absorbed key projection), attention to n tokens (two products of
    H x L x n), and back to values. n is the causal mean of what a token attends to.
    """
    width, heads, latent = shape.hidden_size, shape.num_attention_heads, shape.kv_lora_rank
    query, head, value = shape.q_lora_rank, shape.qk_nope_head_dim, shape.v_head_dim
    attended = mean_attended(length, shape.index_topk, shape.index_kpool)
    projections = width * query + query * heads * head + width * latent + heads * value * width
    found = [
        Products(
            f"DSA q {width} x {query} x {heads * head}, latent {latent}, o", 2 * projections, "projections"
        ),
        Products(
            f"DSA absorbed {heads} x ({head} + {value}) x {latent}",
            2 * heads * (head + value) * latent,
            "projections",
        ),
        Products(
            f"DSA attention {heads} x {latent}, {attended:.0f} tokens",
            4 * heads * latent * attended,
            "attention",
        ),
    ]
    if indexer == "full":
        found += indexer_terms(shape, length)
    return found


def indexer_terms(shape: Architecture, length: int) -> list[Products]:
    """A frozen indexer: projections, pool keys, and the scores of all visible pools (causal mean), forward only."""
    width, heads, head = shape.hidden_size, shape.index_n_heads, shape.index_head_dim
    pools = mean_pools(length, shape.index_kpool)
    projections = shape.q_lora_rank * heads * head + 2 * width * head + width * heads
    scores = 2 * heads * head * pools
    return [
        Products(
            f"indexer {heads} x {head}: q, k, gate, weights", 2 * projections, "projections", learns=False
        ),
        Products(
            f"indexer scores {heads} x {head}, {pools:.0f} pools", scores, "scores", learns=False, grows=True
        ),
    ]


def feed_forward_terms(shape: Architecture, kind: str) -> list[Products]:
    """Dense: three products of D x F. Mixture: the router, the active experts and the shared one."""
    width, inner = shape.hidden_size, shape.moe_intermediate_size
    if kind == "dense":
        return [
            Products(
                f"dense 3 x {width} x {shape.intermediate_size}",
                6 * width * shape.intermediate_size,
                "experts",
            )
        ]
    active, shared = shape.num_experts_per_tok, shape.n_shared_experts
    return [
        Products(
            f"router {width} x {shape.n_routed_experts}", 2 * width * shape.n_routed_experts, "projections"
        ),
        Products(
            f"experts {active} + {shared}, 3 x {width} x {inner}",
            (active + shared) * 6 * width * inner,
            "experts",
        ),
    ]


def mhc_terms(shape: Architecture) -> list[Products]:
    """The two sites of a layer: coefficients (R D) x R (2 + R), pre x, post out and comb^T x."""
    streams, width = shape.hc_mult, shape.hidden_size
    coefficients = 2 * streams * width * streams * (2 + streams)
    mixing = 2 * streams * width + 2 * streams * width + 2 * streams * streams * width
    return [Products(f"mHC 2 sites, {streams} x {width}", 2 * (coefficients + mixing), "streams")]


def mean_pools(length: int, kpool: int) -> float:
    """Mean over a document's tokens of the complete pools that each sees: floor((t + 1) / kpool) at offset t."""
    pools, rest = divmod(length, kpool)
    return (kpool * pools * (pools - 1) / 2 + pools * (rest + 1)) / length


def mean_attended(length: int, topk: int, kpool: int) -> float:
    """Mean number of tokens attended to: of up to topk / kpool selected pools, and of the own open pool."""
    ends = min(length, topk)  # up to there every token before is attended to
    dense = ends * (ends + 1) / 2
    later = (
        length - ends
    )  # topk is whole pools, so the open pool has 1, ..., kpool - 1, 0 tokens from here on
    pools, rest = divmod(later, kpool)
    tail = pools * kpool * (kpool - 1) / 2 + rest * (rest + 1) / 2
    return (dense + later * topk + tail) / length
