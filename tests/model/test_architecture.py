"""Configs in every style, against transformers' own reading of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig, Glm5NextTextConfig

from longstrand.architecture import Architecture
from longstrand.errors import UserError

# The keys of the published text config, at a small size (four layers instead of 45).
PUBLISHED: dict[str, Any] = {
    **{"model_type": "glm5_next_text", "dtype": "bfloat16", "vocab_size": 512, "hidden_size": 64},
    **{"intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4, "n_shared_experts": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16},
    **{"qk_head_dim": 16, "v_head_dim": 20, "head_dim": 0, "mla_use_nope": True, "mhc": True},
    **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "index_kpool": 4},
    **{"index_kpool_compress": True, "index_kpool_always_select_tail": True, "indexer_types": ["full"] * 4},
    **{"indexer_rope_interleave": True, "index_share_for_mtp_iteration": True, "first_k_dense_replace": 3},
    **{"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-5, "swiglu_limit": 10.0},
    **{"hidden_act": "silu", "moe_layer_freq": 1, "moe_router_dtype": "float32", "scoring_func": "sigmoid"},
    **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "max_position_embeddings": 1048576},
    "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"],
    "linear_attn_config": {
        **{"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -4.0},
        **{"safe_gate": True, "kda_layers": [0, 1, 2], "full_attn_layers": [3]},
    },
    **{"pad_token_id": 0, "eos_token_id": [1, 2], "tie_word_embeddings": False, "attention_bias": False},
    **{"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True},
}


def shipped(name: str) -> dict[str, Any]:
    return json.loads((files("longstrand") / "configs" / f"{name}.json").read_text())


def theirs(config: Glm5NextTextConfig) -> dict[str, Any]:
    """What transformers reads, under the names of our fields."""
    names = [f.name for f in dataclasses.fields(Architecture) if f.name != "defaulted"]
    values = {name: getattr(config, name) for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def ours(architecture: Architecture) -> dict[str, Any]:
    values = dataclasses.asdict(architecture)
    del values["defaulted"]
    return values


@pytest.mark.parametrize(
    "config",
    [
        shipped("toy"),
        shipped("wide"),
        PUBLISHED,
        {"model_type": "glm5_next_text"},
        {"num_hidden_layers": 2, "hc_mult": 2, "pad_token_id": None},
        {
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", "linear_attention"] * 2 + ["full_attention"],
        },
        {"num_hidden_layers": 4, "layer_types": ["indexed_attention"] * 4, "index_topk_pattern": "FSFS"},
        {"num_hidden_layers": 4, "layer_types": ["indexed_attention"] * 4, "index_topk_freq": 2},
        {"linear_attn_config": {"num_heads": 3, "gate_lower_bound": None, "safe_gate": True}},
        {"num_local_experts": 16, "num_hidden_layers": 4},
    ],
    ids=[
        "toy",
        "wide",
        "published",
        "silent",
        "two layers",
        "full_attention",
        "pattern",
        "freq",
        "linear",
        "alias",
    ],
)
def test_a_config_is_read_as_transformers_reads_it(config: dict[str, Any]) -> None:
    assert ours(Architecture.from_hf(config)) == theirs(Glm5NextTextConfig(**config))


def test_a_nested_config_is_its_text_part() -> None:
    nested = {"model_type": "glm5_next", "text_config": PUBLISHED, "vision_config": {"depth": 1}}
    assert Architecture.from_hf(nested) == Architecture.from_hf(PUBLISHED)
    assert ours(Architecture.from_hf(nested)) == theirs(Glm5NextConfig(**nested).text_config)


def test_a_flat_config_of_the_outer_type_is_its_own_text_part() -> None:
    assert Architecture.from_hf(PUBLISHED | {"model_type": "glm5_next"}) == Architecture.from_hf(PUBLISHED)


@pytest.mark.parametrize("config", [PUBLISHED, shipped("toy"), shipped("wide"), {}])
def test_the_written_config_is_read_back_to_the_same_model(config: dict[str, Any]) -> None:
    architecture = Architecture.from_hf(config)
    assert Architecture.from_hf(architecture.to_hf()) == architecture
    assert theirs(Glm5NextTextConfig(**architecture.to_hf())) == ours(architecture)


def test_a_silent_config_has_the_class_default_of_kpool_and_says_so() -> None:
    silent = Architecture.from_hf({key: value for key, value in PUBLISHED.items() if key != "index_kpool"})
    assert silent.index_kpool == 16
    assert silent.defaulted == ("index_kpool", "router_aux_loss_coef", "bos_token_id")
    assert Architecture.from_hf(PUBLISHED).index_kpool == 4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"linear_attn_config": None, "linear_lower_bound": None}, "linear_lower_bound = None"),
    ({"linear_attn_config": None, "linear_lower_bound": -5.5}, "linear_lower_bound = -5.5"),
    ({"linear_attn_config": None, "linear_lower_bound": 0.0}, "linear_lower_bound = 0.0"),
    ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, "linear_lower_bound = None"),
    ({"linear_attn_config": {"num_heads": 2}, "linear_num_heads": 3}, "linear_attn_config.num_heads = 2"),
    ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "linear_attn_config.kda_layers = [1, 2, 3]"),
    ({"linear_attn_config": {"head_dims": 3}}, "did you mean head_dim?"),
    ({"n_group": 2}, "n_group = 2"),
    ({"topk_group": 2}, "topk_group = 2"),
    ({"norm_topk_prob": False}, "norm_topk_prob = False"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False"),
    ({"index_kpool_compress": False}, "index_kpool_compress = False"),
    ({"qk_rope_head_dim": 16}, "qk_rope_head_dim = 16"),
    ({"mla_use_nope": False}, "mla_use_nope = False"),
    ({"mhc": False}, "mhc = False"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ({"index_kpool": 3}, "index_topk = 16 is not supported: it must be a multiple of index_kpool = 3"),
    ({"index_kpool": 0}, "index_kpool = 0"),
    ({"hc_mult": 0}, "hc_mult = 0"),
    ({"hc_eps": -1e-6}, "hc_eps = -1e-06"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' is not supported: it must be float"),
    ({"hidden_size": 64.0}, "hidden_size = 64.0"),
    ({"vocab_size": 2**31}, "vocab_size = 2147483648 is not supported: it must be below 2**31"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True"),
    ({"pad_token_id": 512}, "pad_token_id = 512"),
    ({"qk_head_dim": 17}, "qk_head_dim = 17"),
    ({"num_experts_per_tok": 9}, "n_routed_experts = 8"),
    ({"num_local_experts": 9}, "num_local_experts = 9"),
    ({"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types = '3 entries'"),
    ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types = 'sliding_attention'"),
    ({"layer_types": "linear_attention"}, "layer_types = 'linear_attention'"),
    ({"mlp_layer_types": ["dense"] * 3 + ["hash"]}, "mlp_layer_types = 'hash'"),
    ({"indexer_types": ["full"] * 3 + ["shared"]}, "indexer_types[3] = 'shared'"),
    ({"model_type": "deepseek_v3"}, "model_type = 'deepseek_v3'"),
    ({"hiden_size": 64}, "hiden_size is not a known key of the text config; did you mean hidden_size?"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not a known key"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method = 'awq'"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        "quantization_config.weight_block_size = [64, 64]",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Architecture.from_hf(PUBLISHED | change, where="config.json")
    assert str(error.value).startswith("config.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def sharing(indexers: str, kinds: str) -> dict[str, Any]:
    names = {"D": "indexed_attention", "K": "linear_attention"}
    layer_types = [names[kind] for kind in kinds]
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": layer_types,
        "mlp_layer_types": ["dense"] * len(kinds),
        "index_topk_pattern": indexers,
    }


@pytest.mark.parametrize(("indexers", "kinds"), [("FSS", "DDD"), ("SFF", "DDD"), ("FFS", "DKD")])
def test_a_shared_indexer_needs_a_full_one_directly_before(indexers: str, kinds: str) -> None:
    with pytest.raises(UserError, match="right after a full one"):
        Architecture.from_hf(sharing(indexers, kinds))


@pytest.mark.parametrize(("indexers", "kinds"), [("FSF", "DKD"), ("FSF", "DDD")])
def test_a_shared_indexer_is_fine_after_a_full_one_or_without_an_indexer(indexers: str, kinds: str) -> None:
    assert Architecture.from_hf(sharing(indexers, kinds)).indexer_types == ("full", "shared", "full")


def test_tying_is_what_the_outer_config_says() -> None:
    nested = {
        "model_type": "glm5_next",
        "tie_word_embeddings": True,
        "text_config": {"model_type": "glm5_next_text"},
    }
    assert Architecture.from_hf(nested).tie_word_embeddings
    with pytest.raises(UserError, match="tie_word_embeddings = False"):
        Architecture.from_hf({"text_config": {"tie_word_embeddings": True}})


def test_fp8_in_blocks_of_128_is_accepted() -> None:
    entry = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    entry["modules_to_not_convert"] = ["lm_head"]
    nested = {"model_type": "glm5_next", "text_config": PUBLISHED, "quantization_config": entry}
    assert Architecture.from_hf(nested) == Architecture.from_hf(PUBLISHED)


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys, longstrand.architecture; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
