"""Which keys of a `glm5_next` config are known, and what each may say; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from longstrand.errors import UserError

FP8_BLOCK = 128

# What the model can compute in one way only: the supported value, and why another is refused.
FIXED: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "attention projections have no bias"),
    "attention_dropout": (0, "there is no dropout"),
    "hidden_act": ("silu", "the MLPs and the convolution use silu"),
    "index_kpool_always_select_tail": (True, "without the tail the reference selects tokens of the future"),
    "index_kpool_compress": (True, "the indexer scores compressed pools only"),
    "mhc": (True, "the residual is a set of hyper-connected streams"),
    "mla_use_nope": (True, "attention has no positions"),
    "moe_layer_freq": (1, "mlp_layer_types says which layers are sparse"),
    "moe_router_dtype": ("float32", "the router scores in float32"),
    "n_group": (1, "experts are selected from one group"),
    "norm_topk_prob": (True, "expert weights are normalised"),
    "qk_rope_head_dim": (0, "attention has no positions"),
    "scoring_func": ("sigmoid", "the router scores with a sigmoid"),
    "topk_group": (1, "experts are selected from one group"),
    "topk_method": ("noaux_tc", "the correction bias serves the selection only"),
}
# Those of the above that transformers' own config class has.
TRANSFORMERS_FIXED = (
    *("attention_bias", "attention_dropout", "hidden_act", "index_kpool_always_select_tail", "n_group"),
    *("norm_topk_prob", "qk_rope_head_dim", "topk_group"),
)
# Keys that decide something, although they are not fields of `Architecture`.
READ = (
    *("first_k_dense_replace", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern"),
    *("linear_attn_config", "model_type", "num_key_value_heads", "num_local_experts", "qk_head_dim"),
    *("quantization_config",),
)
# Keys that change no number of the text model. Positions (rope) reach nothing since qk_rope_head_dim is 0,
# and transformers overwrites head_dim with qk_rope_head_dim.
HARMLESS = (
    *("architectures", "auto_map", "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "ep_size"),
    *("finetuning_task", "head_dim", "id2label", "index_share_for_mtp_iteration", "indexer_rope_interleave"),
    *("is_decoder", "is_encoder_decoder", "label2id", "name_or_path", "num_labels", "problem_type"),
    *("num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("pretraining_tp", "return_dict", "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta"),
    *("sep_token_id", "torch_dtype", "transformers_version", "use_cache", "mtp_layer_types"),
    *("mtp_mlp_layer_types",),
)
# Keys of the part around the text config.
OUTER = (
    *("bos_token_id", "eos_token_id", "image_end_token_id", "image_start_token_id", "image_token_id"),
    *("model_type", "pad_token_id", "quantization_config", "text_config", "tie_word_embeddings"),
    *("video_end_token_id", "video_start_token_id", "video_token_id", "vision_config"),
)
LINEAR = {  # linear_attn_config of the published style -> flat name
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
LINEAR_OTHER = ("safe_gate", "kda_layers", "full_attn_layers")
MAY_BE_ZERO = ("hc_eps", "initializer_range", "router_aux_loss_coef")
DSA_NAMES = ("indexed_attention", "deepseek_sparse_attention", "full_attention")
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_FP8_HARMLESS = ("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")


def refuse_unknown(found: Iterable[str], known: Iterable[str], where: str, kind: str) -> None:
    """Raises a `UserError` for the first name that is not known, with the nearest that is."""
    known = set(known)
    for name in found:
        if name not in known and not name.startswith("_"):
            near = get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{where}: {name} is not a known {kind}{hint}")


def check_quantization(entry: Mapping[str, Any] | None, where: str) -> None:
    """Accepts no quantization, or FP8 e4m3 in 128 x 128 blocks with dynamic activations."""
    if entry is None:
        return
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: quantization_config = {entry!r} is not supported: it must be an object")
    refuse_unknown(entry, {*_FP8, *_FP8_HARMLESS, "weight_block_size"}, where, "key of quantization_config")
    expected: dict[str, Any] = {**_FP8, "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    for name, value in expected.items():
        optional = value if name in ("fmt", "activation_scheme") else None
        if entry.get(name, optional) != value:
            rule = f"it must be {value!r} (FP8 e4m3 in blocks); load the BF16 checkpoint instead"
            raise UserError(
                f"{where}: quantization_config.{name} = {entry.get(name)!r} is not supported: {rule}"
            )
