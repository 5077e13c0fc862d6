"""What a checkpoint calls each parameter: published names, transformers' names, and where their parts lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from longstrand.architecture import KDA, Architecture

Shape = tuple[int, ...]

PREFIX = "model.language_model."
# A text-only folder, the base model saved alone, and the text model saved alone.
_PREFIXES = (PREFIX, "model.", "language_model.", "")
_KEPT_FLOAT32 = re.compile(
    r"\.(A_log|dt_bias|[qkv]_conv1d\.weight|hc_(attn|ffn)_(fn|base|scale)|e_score_correction_bias"
    r"|index_kpool_compress_ape)$"
)
_MTP_MARKS = ("eh_proj.", "enorm.", "hnorm.", "shared_head.")


@dataclass(frozen=True)
class Part:
    """One place where a tensor of a file and a parameter of the model hold the same numbers."""

    tensor: str  # name in the files, without the prefix of the text model
    parameter: str
    index: tuple[int | slice, ...] = ()  # parameter[index] is the part; () is all of it
    rows: tuple[int, int] | None = None  # tensor[first:last] is the part; None is all of it


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


def spellings(parameter: str, shape: Shape) -> Iterator[list[Part]]:
    """The ways in which a checkpoint may hold a parameter, the published one first."""
    direct = [Part(parameter, parameter)]
    stem, _, leaf = parameter.rpartition(".")
    if conv := re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", parameter):
        first = "qkv".index(conv[2]) * shape[0]
        yield direct
        yield [Part(f"{conv[1]}.conv1d.weight", parameter, rows=(first, first + shape[0]))]
    elif gate := re.fullmatch(r"(.*self_attn)\.((f_a_proj|f_b_proj)\.weight|dt_bias|A_log)", parameter):
        yield direct
        yield [Part(f"{gate[1]}.forget_gate.{gate[2]}", parameter)]
    elif hyper := re.fullmatch(r"(.*)\.hc_(attn|ffn)_(fn|base|scale)", parameter):
        yield direct
        yield [Part(f"{hyper[1]}.{hyper[2]}_hc.{hyper[3]}", parameter)]
    elif stem.endswith("mlp.experts"):
        yield _per_expert(stem, leaf, parameter, shape)
        yield direct
    else:
        yield direct


def published_parts(architecture: Architecture) -> list[Part]:
    """How a model without a source is written."""
    shapes = parameter_shapes(architecture)
    return [part for name, shape in shapes.items() for part in next(spellings(name, shape))]


def full_name(tensor: str, prefix: str = PREFIX) -> str:
    """The name of a tensor in a file; the head stands outside the text model."""
    return tensor if tensor.startswith("lm_head.") else prefix + tensor


def find_prefix(names: Iterable[str]) -> str | None:
    """What stands before `embed_tokens.weight` in a file; None where no known prefix fits."""
    names = set(names)
    return next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names), None)


def kept_aside(names: Iterable[str], prefix: str, num_hidden_layers: int) -> set[str]:
    """The tensors of the vision tower and of multi-token prediction: not ours, passed on as they are.

    A whole decoder layer past the last one without the marks of multi-token prediction is not among them: it
    would mean that `num_hidden_layers` is too small.
    """
    names = set(names)
    visual = prefix.replace("language_model.", "") + "visual."
    aside = {name for name in names if name.startswith((visual, "mtp.", prefix + "mtp."))}
    layers: dict[int, list[str]] = {}
    for name in names:
        if found := re.match(re.escape(prefix) + r"layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(found[1]), []).append(found[2])
            if ".shared_head." in name:
                aside.add(name)
    for layer, inside in layers.items():
        marked = any(name.startswith(_MTP_MARKS) for name in inside)
        if layer >= num_hidden_layers and (marked or "input_layernorm.weight" not in inside):
            aside |= {f"{prefix}layers.{layer}.{name}" for name in inside}
    return aside


def _under(prefix: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {prefix + name: shape for name, shape in shapes.items()}


def _per_expert(stem: str, leaf: str, parameter: str, shape: Shape) -> list[Part]:
    if leaf == "down_proj":
        return [Part(f"{stem}.{e}.down_proj.weight", parameter, (e,)) for e in range(shape[0])]
    width = shape[1] // 2
    halves = (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width)))
    return [
        Part(f"{stem}.{e}.{name}.weight", parameter, (e, at)) for e in range(shape[0]) for name, at in halves
    ]


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
