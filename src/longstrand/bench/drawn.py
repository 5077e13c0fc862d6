"""Tiny configs, weights and documents, drawn from a seed, that leave no term of the model degenerate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.plan.parameters import parameter_shapes

LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 129)
_LAYERS = ("KKKD", "DK", "DDK", "KD", "D", "KDDK", "DKD", "K", "DDKDD")  # DD: full, then shared
_ACTIVE = {2: 2, 3: 2, 4: 2, 6: 3, 8: 2, 16: 4}  # experts -> active ones


def draw_architecture(case: int) -> Architecture:
    """A tiny config; the cases together cover pool sizes, head and expert counts, widths and layer orders."""
    rng = random.Random(f"parity {case}")
    kinds = _LAYERS[case % len(_LAYERS)]
    kpool = (4, 1, 2, 16)[case % 4]
    experts = rng.choice(list(_ACTIVE))
    dense = ("none", "first", "all", "first")[case // 4]
    layers = len(kinds)
    shared = [i > 0 and kinds[i - 1 : i + 1] == "DD" for i in range(layers)]
    sizes: dict[str, Any] = {
        "vocab_size": rng.choice([17, 31, 50]),
        "hidden_size": rng.choice([21, 24, 33, 40]),
        "intermediate_size": rng.choice([20, 37]),
        "moe_intermediate_size": rng.choice([8, 13]),
        "n_routed_experts": experts,
        "num_experts_per_tok": _ACTIVE[experts],
        "n_shared_experts": rng.choice([1, 1, 2]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "num_attention_heads": 1 + case % 8,
        "kv_lora_rank": rng.choice([8, 11, 16]),
        "q_lora_rank": rng.choice([9, 16]),
        "qk_nope_head_dim": rng.choice([6, 8]),
        "v_head_dim": rng.choice([5, 8, 12]),
        "index_topk": {1: 6, 2: 8, 4: 12, 16: 32}[kpool],
        "index_kpool": kpool,
        "index_n_heads": 16,
        "index_head_dim": rng.choice([8, 12]),
        "linear_num_heads": 1 + (3 * case) % 8,
        "linear_head_dim": rng.choice([8, 11, 16]),
        "linear_conv_kernel_dim": rng.choice([4, 4, 4, 3]),
        "linear_lower_bound": rng.choice([-5.0, -5.0, -2.0]),
        "hc_mult": rng.choice([4, 4, 4, 2, 3]),
        "hc_sinkhorn_iters": rng.choice([20, 20, 7]),
        "swiglu_limit": rng.choice([10.0, 0.7]),
        "tie_word_embeddings": case == 5,
        "pad_token_id": None,  # the oracle's embedding has no gradient at its pad token
    }
    return Architecture.from_hf(
        sizes
        | {
            "num_hidden_layers": layers,
            "layer_types": ["linear_attention" if kind == "K" else "indexed_attention" for kind in kinds],
            "mlp_layer_types": [
                "dense" if dense == "all" or (dense == "first" and i == 0) else "sparse"
                for i in range(layers)
            ],
            "indexer_types": ["shared" if each else "full" for each in shared],
        }
    )


def lengths(architecture: Architecture) -> list[int]:
    """The document lengths of a case: the general ones, and those around the edge of dense attention."""
    topk, kpool = architecture.index_topk, architecture.index_kpool
    return sorted({*LENGTHS, topk - 1, topk, topk + 1, topk + kpool - 1, topk + kpool})


def draw_weights(
    architecture: Architecture, seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Weights with spread in every tensor, so that no term of the model is degenerate.

    Gates, pool biases and hyper-connections are away from their initial zeros and ones, the router's bias
    changes choices, and matrices keep the scale of what passes through them.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _draw(
            name,
            torch.randn(shape, generator=generator, dtype=torch.float64),
            architecture.tie_word_embeddings,
        ).to(dtype)
        for name, shape in parameter_shapes(architecture).items()
    }


def draw_documents(architecture: Architecture, lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Random tokens, one document per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(architecture.vocab_size, (length,), generator=generator) for length in lengths]


def _draw(name: str, noise: Tensor, tied: bool) -> Tensor:
    around = {  # last part of the name -> mean and spread
        "A_log": (0.0, 0.7),
        "dt_bias": (-1.0, 1.5),
        "e_score_correction_bias": (0.0, 0.15),
        "index_kpool_compress_ape": (0.0, 0.8),
        "bias": (0.0, 0.3),
        "hc_attn_base": (0.0, 0.7),
        "hc_ffn_base": (0.0, 0.7),
        "hc_attn_scale": (1.0, 0.4),
        "hc_ffn_scale": (1.0, 0.4),
    }
    leaf = name.rpartition(".")[2]
    if leaf in around:
        mean, spread = around[leaf]
        return mean + spread * noise
    if noise.dim() == 1:
        return 1 + 0.3 * noise
    if name == "embed_tokens.weight" and not tied:
        return noise
    return noise / noise.shape[-1] ** 0.5
