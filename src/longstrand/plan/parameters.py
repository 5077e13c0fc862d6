"""Every parameter of a model: its shape, the group that trains it, and what stays float32."""

from __future__ import annotations

import re

from longstrand.architecture import KDA, Architecture

Shape = tuple[int, ...]

_KEPT_FLOAT32 = re.compile(
    r"\.(A_log|dt_bias|[qkv]_conv1d\.weight|hc_(attn|ffn)_(fn|base|scale)|e_score_correction_bias"
    r"|index_kpool_compress_ape)$"
)
_GROUPS = (  # first match wins
    ("embedding", ("embed_tokens.",)),
    ("head", ("lm_head.",)),
    ("mhc", (".hc_attn_", ".hc_ffn_")),
    ("indexer", (".indexer.",)),
    ("norms", ("norm.weight",)),
    ("router", (".mlp.gate.",)),
    ("experts", (".mlp.experts.", ".mlp.shared_experts.")),
    ("dense", (".mlp.",)),
)
GROUPS = (*dict(_GROUPS), "kda", "mla")
"""In the order in which they are shown."""


def keeps_float32(parameter: str) -> bool:
    """Whether a parameter stays float32 in a bfloat16 model: small, and wrong when rounded.

    Gates, convolutions, hyper-connections, the router's correction bias and the pool's position bias.
    """
    return _KEPT_FLOAT32.search("." + parameter) is not None


def parameter_shapes(architecture: Architecture) -> dict[str, Shape]:
    """The shape of every parameter and buffer of a model; a tied head is not one of them."""
    a = architecture
    shapes: dict[str, Shape] = {"embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for layer in range(a.num_hidden_layers):
        kda = a.layer_types[layer] == KDA
        attention = _kda_shapes(a) if kda else _dsa_shapes(a, a.indexer_types[layer] == "full")
        mlp = _moe_shapes(a) if a.mlp_layer_types[layer] == "sparse" else _mlp_shapes(a, a.intermediate_size)
        parts = {**_residual_shapes(a), **_under("self_attn.", attention), **_under("mlp.", mlp)}
        shapes |= _under(f"layers.{layer}.", parts)
    shapes["norm.weight"] = (a.hidden_size,)
    if not a.tie_word_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def group_of(parameter: str, architecture: Architecture) -> str:
    """The group that a recipe trains or freezes a parameter with."""
    for group, parts in _GROUPS:
        if any(part in parameter for part in parts):
            return group
    layer = int(parameter.split(".")[1])
    return "kda" if architecture.layer_types[layer] == KDA else "mla"


def _under(prefix: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {prefix + name: shape for name, shape in shapes.items()}


def _residual_shapes(a: Architecture) -> dict[str, Shape]:
    mixes = (2 + a.hc_mult) * a.hc_mult
    shapes: dict[str, Shape] = {}
    for norm, site in (("input_layernorm", "attn"), ("post_attention_layernorm", "ffn")):
        shapes[f"{norm}.weight"] = (a.hidden_size,)
        shapes[f"hc_{site}_fn"] = (mixes, a.hc_mult * a.hidden_size)
        shapes[f"hc_{site}_base"] = (mixes,)
        shapes[f"hc_{site}_scale"] = (3,)
    return shapes


def _kda_shapes(a: Architecture) -> dict[str, Shape]:
    D, K, HK = a.hidden_size, a.linear_head_dim, a.linear_num_heads * a.linear_head_dim
    shapes: dict[str, Shape] = {f"{each}_proj.weight": (HK, D) for each in "qkv"}
    shapes |= {f"{each}_conv1d.weight": (HK, 1, a.linear_conv_kernel_dim) for each in "qkv"}
    shapes |= {"f_a_proj.weight": (K, D), "f_b_proj.weight": (HK, K), "dt_bias": (HK,)}
    shapes |= {"A_log": (a.linear_num_heads,), "b_proj.weight": (a.linear_num_heads, D)}
    shapes |= {"g_a_proj.weight": (K, D), "g_b_proj.weight": (HK, K)}
    return shapes | {"o_norm.weight": (K,), "o_proj.weight": (D, HK)}


def _dsa_shapes(a: Architecture, indexer: bool) -> dict[str, Shape]:
    D, H, Q, L = a.hidden_size, a.num_attention_heads, a.q_lora_rank, a.kv_lora_rank
    shapes: dict[str, Shape] = {"q_a_proj.weight": (Q, D), "q_a_layernorm.weight": (Q,)}
    shapes |= {"q_b_proj.weight": (H * a.qk_nope_head_dim, Q)}
    shapes |= {"kv_a_proj_with_mqa.weight": (L, D), "kv_a_layernorm.weight": (L,)}
    shapes |= {"kv_b_proj.weight": (H * (a.qk_nope_head_dim + a.v_head_dim), L)}
    shapes |= {"o_proj.weight": (D, H * a.v_head_dim)}
    if not indexer:
        return shapes
    I, DI = a.index_n_heads, a.index_head_dim  # noqa: E741
    inside: dict[str, Shape] = {"wq_b.weight": (I * DI, Q), "wk.weight": (DI, D)}
    inside |= {"k_norm.weight": (DI,), "k_norm.bias": (DI,), "weights_proj.weight": (I, D)}
    inside |= {"index_kpool_compress_ape": (a.index_kpool, DI), "index_kpool_compress_gate": (DI, D)}
    return shapes | _under("indexer.", inside)


def _mlp_shapes(a: Architecture, width: int) -> dict[str, Shape]:
    D = a.hidden_size
    return {"gate_proj.weight": (width, D), "up_proj.weight": (width, D), "down_proj.weight": (D, width)}


def _moe_shapes(a: Architecture) -> dict[str, Shape]:
    D, E, F = a.hidden_size, a.n_routed_experts, a.moe_intermediate_size
    shapes: dict[str, Shape] = {"gate.weight": (E, D), "gate.e_score_correction_bias": (E,)}
    shapes |= {"experts.gate_up_proj": (E, 2 * F, D), "experts.down_proj": (E, D, F)}
    return shapes | _under("shared_experts.", _mlp_shapes(a, F * a.n_shared_experts))
