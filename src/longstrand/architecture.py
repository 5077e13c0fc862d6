"""The shape of a model, read from a Hugging Face config; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

from longstrand import hf_config_keys as keys
from longstrand.errors import UserError

KDA, DSA = "linear_attention", "indexed_attention"

Json = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """Every number of a `glm5_next` text model, under the names of its Hugging Face text config.

    The defaults are those of transformers' `Glm5NextTextConfig` and stand where a config is silent
    (`index_kpool` is 16 there, although the published checkpoints say 4); `defaulted` names those fields.
    """

    layer_types: tuple[str, ...]  # "linear_attention" (KDA) or "indexed_attention" (DSA)
    mlp_layer_types: tuple[str, ...]  # "dense" or "sparse"
    indexer_types: tuple[str, ...]  # "full" or "shared"; read for DSA layers only
    vocab_size: int = 154880
    hidden_size: int = 4096
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 45
    num_attention_heads: int = 64
    n_shared_experts: int = 1
    n_routed_experts: int = 288
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    kv_lora_rank: int = 512
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 256
    v_head_dim: int = 256
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 10.0
    initializer_range: float = 0.02
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 32
    index_kpool: int = 16
    linear_head_dim: int = 128
    linear_num_heads: int = 64
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float = -5.0
    hc_mult: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: int = 20
    router_aux_loss_coef: float = 0.001
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 154820
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    defaulted: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "config") -> Architecture:
        """Reads a `glm5_next` config or its text part: flat, nested, or in the published hub style.

        Args:
            where: what to call the config in an error, normally its file.

        Raises:
            UserError: a key is unknown, contradicts another, or asks for arithmetic that is not supported.
        """
        return cls(**_Reader(config, where).values())

    @classmethod
    def from_file(cls, config: Mapping[str, Any], where: str) -> Architecture:
        """As `from_hf`, of a file, which must say what model it is.

        transformers writes every size into a flat config; a nested text config it leaves silent about those that are
        its defaults, beside a model_type.

        Raises:
            UserError: it does not, or as `from_hf`.
        """
        inner = config.get("text_config")
        text = inner if isinstance(inner, Mapping) else config
        named = text is inner and ("model_type" in config or "model_type" in text)
        missing = [name for name in ("hidden_size", "num_hidden_layers") if name not in text]
        found = cls.from_hf(config, where)
        if missing and not named:
            raise UserError(
                f"{where}: says no {' and no '.join(missing)}, so not what model it is; give a model's config.json, "
                "with its model_type, hidden_size, num_hidden_layers and other sizes"
            )
        return found

    def to_hf(self) -> Json:
        """The text config that transformers reads back to the same model."""
        names = [f.name for f in fields(self) if f.name != "defaulted"]
        values = {name: getattr(self, name) for name in names}
        values |= {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        values |= {name: keys.FIXED[name][0] for name in keys.TRANSFORMERS_FIXED}
        return values | {
            "model_type": "glm5_next_text",
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_nope_head_dim,
            "use_cache": True,
        }


class _Reader:
    """One config on its way to an `Architecture`: each method resolves and checks a group of its keys."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.outer = config
        self.nested = config.get("text_config") is not None
        text = config["text_config"] if self.nested else config
        if not isinstance(text, Mapping):
            self.refuse("text_config", text, "it must be an object")
        self.text: Json = dict(text)

    def values(self) -> Json:
        """The arguments of `Architecture`, each checked."""
        self._check_names()
        self._check_fixed()
        keys.check_quantization(self.outer.get("quantization_config"), self.where)
        keys.check_quantization(self.text.get("quantization_config"), self.where)
        self._merge_aliases()
        numbers = [f for f in fields(Architecture) if f.default is not MISSING and f.name != "defaulted"]
        found = {f.name: self._typed(f.name, str(f.type), self.text.get(f.name, f.default)) for f in numbers}
        found["defaulted"] = tuple(f.name for f in numbers if f.name not in self.text)
        self._check_ranges(found)
        found["layer_types"] = self._layer_types(found["num_hidden_layers"])
        found["mlp_layer_types"] = self._mlp_layer_types(found["num_hidden_layers"])
        found["indexer_types"] = self._indexer_types(found["layer_types"])
        self._check_experts(found)
        return found

    def refuse(self, name: str, value: object, rule: str) -> NoReturn:
        raise UserError(f"{self.where}: {name} = {value!r} is not supported: {rule}")

    def _check_names(self) -> None:
        known = {f.name for f in fields(Architecture)} | {*keys.FIXED, *keys.READ, *keys.HARMLESS}
        known.remove("defaulted")
        if not self.nested:
            known |= set(keys.OUTER)
        else:
            keys.refuse_unknown(self.outer, {*keys.OUTER, *keys.HARMLESS}, self.where, "key")
        keys.refuse_unknown(self.text, known, self.where, "key of the text config")
        names = ("glm5_next",) if self.nested else ("glm5_next", "glm5_next_text")
        for config, allowed in ((self.outer, names), (self.text, ("glm5_next_text", *names))):
            kind = config.get("model_type", allowed[0])
            if kind not in allowed:
                self.refuse("model_type", kind, f"it must be {' or '.join(allowed)}")

    def _check_fixed(self) -> None:
        for name, (allowed, why) in keys.FIXED.items():
            value = self.text.get(name, allowed)
            if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
                self.refuse(name, value, f"it must be {allowed!r} ({why})")

    def _merge_aliases(self) -> None:
        """Brings the published style to transformers' names, and refuses two spellings that disagree."""
        text = self.text
        linear = self._linear()
        given = [(old, new) for old, new in keys.LINEAR.items() if old in linear]
        spellings = [(f"linear_attn_config.{old}", linear[old], new) for old, new in given]
        if "num_local_experts" in text:
            spellings.append(("num_local_experts", text["num_local_experts"], "n_routed_experts"))
        for old, value, new in spellings:
            if text.setdefault(new, value) != value:
                self.refuse(old, value, f"{new} = {text[new]!r} says otherwise; keep one of the two")
        if text.get("linear_lower_bound", -5.0) is None and linear and linear.get("safe_gate", True):
            text["linear_lower_bound"] = -5.0
        if self.nested:  # transformers ties by the outer key alone
            tied = self.outer.get("tie_word_embeddings", False)
            if text.setdefault("tie_word_embeddings", tied) != tied:
                self.refuse("tie_word_embeddings", tied, "the text config says otherwise; set both alike")

    def _linear(self) -> Mapping[str, Any]:
        linear = self.text.get("linear_attn_config") or {}
        if not isinstance(linear, Mapping):
            self.refuse("linear_attn_config", linear, "it must be an object")
        known = {*keys.LINEAR, *keys.LINEAR_OTHER}
        keys.refuse_unknown(linear, known, self.where, "key of linear_attn_config")
        return linear

    def _typed(self, name: str, annotation: str, value: Any) -> Any:
        if name == "eos_token_id" and isinstance(value, (list, tuple)):
            return tuple(self._typed("bos_token_id", "int", each) for each in value)
        if annotation == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        kinds: dict[str, type] = {"int": int, "float": float, "bool": bool}
        allowed = [kinds[part] for part in annotation.split(" | ") if part in kinds]
        optional = "None" in annotation or name == "linear_lower_bound"
        if not (value is None and optional) and type(value) not in allowed:
            self.refuse(name, value, f"it must be {annotation}")
        return value

    def _check_ranges(self, found: Json) -> None:
        def need(name: str, rule: str, holds: Callable[[Any], bool]) -> None:
            if not holds(found[name]):
                silent = ", and this default stands where a config is silent"
                self.refuse(name, found[name], f"it must be {rule}{silent * (name in found['defaulted'])}")

        for f in fields(Architecture):
            if f.type == "int":
                need(f.name, "below 2**31", lambda x: x < 2**31)
            if f.name in keys.MAY_BE_ZERO:
                need(f.name, "finite and not negative", lambda x: 0 <= x < math.inf)
            elif f.type in ("int", "float") and f.name != "linear_lower_bound":
                need(f.name, "finite and above 0", lambda x: 0 < x < math.inf)
        bound = "at least -5 and below 0 (null means an unbounded decay, for which float32 does not suffice)"
        need("linear_lower_bound", bound, lambda x: x is not None and -5 <= x < 0)
        kpool = found["index_kpool"]
        need("index_topk", f"a multiple of index_kpool = {kpool}", lambda x: x % kpool == 0)
        need("pad_token_id", "null or a token id", lambda x: x is None or 0 <= x < found["vocab_size"])
        heads = self.text.get("num_key_value_heads")
        if heads not in (None, found["num_attention_heads"]):
            self.refuse("num_key_value_heads", heads, "it must equal num_attention_heads")
        if self.text.get("qk_head_dim", found["qk_nope_head_dim"]) != found["qk_nope_head_dim"]:
            self.refuse("qk_head_dim", self.text["qk_head_dim"], "it must equal qk_nope_head_dim")

    def _check_experts(self, found: Json) -> None:
        experts = found["n_routed_experts"]
        active = found["num_experts_per_tok"]
        if "sparse" in found["mlp_layer_types"] and experts < max(2, active):
            rule = f"it must be at least 2 and at least num_experts_per_tok = {active}"
            self.refuse("n_routed_experts", experts, rule)

    def _per_layer(self, name: str, values: Any, allowed: tuple[str, ...], layers: int) -> tuple[str, ...]:
        if not isinstance(values, (list, tuple)):
            self.refuse(name, values, "it must be a list with an entry per layer")
        for value in values:
            if value not in allowed:
                self.refuse(name, value, f"its entries must be {', '.join(allowed)}")
        if len(values) != layers:
            self.refuse(name, f"{len(values)} entries", f"num_hidden_layers = {layers}")
        return tuple(values)

    def _layer_types(self, layers: int) -> tuple[str, ...]:
        given = self.text.get("layer_types") or [DSA if i % 4 == 3 else KDA for i in range(layers)]
        checked = self._per_layer("layer_types", given, (KDA, *keys.DSA_NAMES), layers)
        types = tuple(KDA if kind == KDA else DSA for kind in checked)
        linear = self._linear()
        for key, kind in (("kda_layers", KDA), ("full_attn_layers", DSA)):
            indices = [i for i, each in enumerate(types) if each == kind]
            if linear.get(key, indices) != indices:
                rule = f"layer_types says {indices}, counted from 0"
                self.refuse(f"linear_attn_config.{key}", linear[key], rule)
        return types

    def _mlp_layer_types(self, layers: int) -> tuple[str, ...]:
        default = ["dense"] * min(3, layers) + ["sparse"] * (layers - 3)
        given = self.text.get("mlp_layer_types") or default
        types = self._per_layer("mlp_layer_types", given, ("dense", "sparse"), layers)
        leading = next((i for i, kind in enumerate(types) if kind == "sparse"), layers)
        first = self._typed("first_k_dense_replace", "int", self.text.get("first_k_dense_replace", leading))
        if min(first, layers) != leading:
            rule = f"mlp_layer_types starts with {leading} dense layers, and transformers reads that alone"
            self.refuse("first_k_dense_replace", first, rule)
        return types

    def _indexer_types(self, layer_types: tuple[str, ...]) -> tuple[str, ...]:
        layers = len(layer_types)
        given, pattern = self.text.get("indexer_types"), self.text.get("index_topk_pattern")
        if given is None and isinstance(pattern, str):
            given = [{"F": "full", "S": "shared"}.get(each, each) for each in pattern]
        given = pattern if given is None else given
        if given is None:
            every = max(self._typed("index_topk_freq", "int", self.text.get("index_topk_freq", 1)), 1)
            skipped = self.text.get("index_skip_topk_offset", 2)
            offset = self._typed("index_skip_topk_offset", "int", skipped)
            given = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
        types = self._per_layer("indexer_types", given, ("full", "shared"), layers)
        for i, kind in enumerate(types):
            follows = i > 0 and layer_types[i - 1] == DSA and types[i - 1] == "full"
            if layer_types[i] == DSA and kind == "shared" and not follows:
                self.refuse(f"indexer_types[{i}]", kind, "only a DSA layer right after a full one can share")
        return types
