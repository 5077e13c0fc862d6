"""The shape of a model, read from a Hugging Face config; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Every number of a `glm5_next` text model, under the names of its Hugging Face text config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    swiglu_limit: float
    initializer_range: float
    index_topk: int
    index_head_dim: int
    index_n_heads: int
    index_kpool: int
    linear_head_dim: int
    linear_num_heads: int
    linear_conv_kernel_dim: int
    linear_lower_bound: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    router_aux_loss_coef: float
    tie_word_embeddings: bool
    pad_token_id: int | None
    layer_types: tuple[str, ...]  # "linear_attention" (KDA) or "indexed_attention" (DSA)
    mlp_layer_types: tuple[str, ...]  # "dense" or "sparse"
    indexer_types: tuple[str, ...]  # "full" or "shared"; read for DSA layers only

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Architecture:
        """Reads a `glm5_next` config or its text part."""
        text = config.get("text_config") or config
        names = cls.__dataclass_fields__
        values = {name: text[name] for name in names}
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            values[name] = tuple(values[name])
        return cls(**values)
