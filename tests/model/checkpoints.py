"""Checkpoint folders made by transformers and by hand, and a bare holder of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from oracle import draw_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

from longstrand.architecture import Architecture
from longstrand.model.hf import FolderWeights, SourceInfo
from longstrand.model.hf.read import named_tensors
from longstrand.plan.parameters import keeps_float32, parameter_shapes

TEXT: dict[str, Any] = {
    **{"model_type": "glm5_next_text", "vocab_size": 23, "hidden_size": 20, "intermediate_size": 28},
    **{"moe_intermediate_size": 12, "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 10, "q_lora_rank": 14},
    **{"qk_nope_head_dim": 6, "v_head_dim": 9, "index_topk": 8, "index_head_dim": 6, "index_n_heads": 16},
    **{"index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 2, "pad_token_id": None},
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
VISION = {
    **{
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
    },
    **{"out_hidden_size": 20, "projection_intermediate_size": 16, "patch_size": 2},
}
ARCHITECTURE = Architecture.from_hf(TEXT)
ROOT = "model.language_model."


class Holder(nn.Module):
    """Parameters and buffers under our names, and nothing else; some in float32, unless all are to be rounded."""

    def __init__(
        self, architecture: Architecture = ARCHITECTURE, dtype: torch.dtype = torch.float32, keep: bool = True
    ) -> None:
        super().__init__()
        self.architecture = architecture
        for name, shape in parameter_shapes(architecture).items():
            module: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            kept = torch.float32 if keep and keeps_float32(name) and dtype != torch.float64 else dtype
            value = torch.full(shape, float("nan"), dtype=kept)
            if leaf == "e_score_correction_bias":
                module.register_buffer(leaf, value)
            else:
                module.register_parameter(leaf, nn.Parameter(value))

    def fill(self, weights: dict[str, Tensor]) -> Holder:
        self.load_state_dict(weights)
        return self


def drawn(architecture: Architecture = ARCHITECTURE, dtype: torch.dtype = torch.float64) -> Holder:
    return Holder(architecture, dtype).fill(draw_weights(architecture, seed=5))


def load_into(model: nn.Module, folder: Path) -> SourceInfo:
    """Fills all of a model that has memory already."""
    with FolderWeights(folder) as weights:
        weights.fill(named_tensors(model, weights.architecture))
    return weights.source


def made_by_transformers(
    folder: Path, own_names: bool = False, **changes: Any
) -> Glm5NextForConditionalGeneration:
    """A checkpoint that transformers wrote, in published names or its own, and the model that it wrote."""
    config = Glm5NextConfig(text_config=TEXT, vision_config=VISION, **changes)
    torch.manual_seed(11)
    model = Glm5NextForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained(folder, save_original_format=not own_names)
    return model


def published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names to the published ones, experts taken apart."""
    out: dict[str, Tensor] = {}
    for name, value in weights.items():
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith("mlp.experts"):
            out[name if name == "lm_head.weight" else ROOT + name] = value.clone()
            continue
        for e, expert in enumerate(value):
            halves = expert.chunk(2) if leaf == "gate_up_proj" else (expert,)
            for part, half in zip(leaf.removesuffix("_proj").split("_"), halves, strict=True):
                out[f"{ROOT}{stem}.{e}.{part}_proj.weight"] = half.clone()
    return out


def write_folder(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A folder as one would find it on the hub: nested config, weights, tokenizer."""
    folder.mkdir(parents=True)
    config = {
        **{"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next"},
        **{"text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False, "dtype": "bfloat16"},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    save_file(tensors, folder / "model.safetensors")
    return folder


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file, as it is."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            name
        )
