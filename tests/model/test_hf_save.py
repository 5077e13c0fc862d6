"""Writing Hugging Face folders: the source's names, dtypes and bits, and what transformers makes of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from checkpoints import (
    ARCHITECTURE,
    ROOT,
    TEXT,
    Holder,
    assert_same_tensors,
    drawn,
    load_into,
    made_by_transformers,
    published,
    read_folder,
    write_folder,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

from longstrand.architecture import Architecture
from longstrand.bench.oracle import _to_theirs
from longstrand.errors import RunFailed, UserError
from longstrand.model.hf import read_architecture, save_from
from longstrand.plan.parameters import keeps_float32

PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


@pytest.mark.parametrize("own_names", [False, True], ids=["published names", "transformers' names"])
def test_a_loaded_folder_is_written_back_bit_by_bit(tmp_path: Path, own_names: bool) -> None:
    made_by_transformers(tmp_path / "source", own_names)
    holder = Holder()
    source = load_into(holder, tmp_path / "source")
    save_from(holder, tmp_path / "written", source)
    assert_same_tensors(read_folder(tmp_path / "written"), read_folder(tmp_path / "source"))
    assert (tmp_path / "written" / "config.json").read_text() != ""
    for name in ("config.json", "generation_config.json"):
        written, original = (
            json.loads((tmp_path / where / name).read_text()) for where in ("written", "source")
        )
        assert written == original


def mixed() -> dict[str, Tensor]:
    """A BF16 checkpoint in which what is kept in float32 is F32 and needs it."""
    needs_float32 = 1 + 2.0**-10
    weights: dict[str, Tensor] = {}
    for name, value in drawn().state_dict().items():
        kept = keeps_float32(name)
        weights[name] = torch.full(value.shape, needs_float32) if kept else value.to(torch.bfloat16)
    return published(weights)


def test_what_is_kept_in_float32_survives_a_bfloat16_model(tmp_path: Path) -> None:
    tensors = mixed()
    float32 = {name.rpartition(".")[2] for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert float32 >= {
        "A_log",
        "dt_bias",
        "hc_attn_fn",
        "hc_ffn_base",
        "hc_attn_scale",
        "e_score_correction_bias",
    }
    assert "index_kpool_compress_ape" in float32
    holder = Holder(dtype=torch.bfloat16)
    source = load_into(holder, write_folder(tmp_path / "source", tensors))
    assert source.casts == {}
    save_from(holder, tmp_path / "written", source)
    assert_same_tensors(read_folder(tmp_path / "written"), tensors)


def test_what_loading_rounded_comes_back_unless_it_moved(tmp_path: Path) -> None:
    tensors = mixed()
    holder = Holder(dtype=torch.bfloat16, keep=False)
    source = load_into(holder, write_folder(tmp_path / "source", tensors))
    assert source.casts == {"F32 to bfloat16": sum(t.dtype == torch.float32 for t in tensors.values())}
    with torch.no_grad():
        holder.get_parameter("layers.0.hc_attn_fn")[1, 2] = 3.0
    save_from(holder, tmp_path / "written", source)
    tensors[f"{ROOT}layers.0.hc_attn_fn"][1, 2] = 3.0
    assert_same_tensors(read_folder(tmp_path / "written"), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wider_model_is_written_in_the_dtypes_of_its_source(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = mixed()
    holder = Holder(dtype=dtype)
    source = load_into(holder, write_folder(tmp_path / "source", tensors))
    save_from(holder, tmp_path / "written", source)
    assert_same_tensors(read_folder(tmp_path / "written"), tensors)


def test_vision_and_multi_token_prediction_pass_through_untouched(tmp_path: Path) -> None:
    tensors = mixed()
    aside = {
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(48, 16),
        "model.visual.patch_embed.proj.bias": torch.randn(5).to(torch.float16),
        f"{ROOT}layers.3.eh_proj.weight": torch.randn(20, 40).to(torch.bfloat16),
        f"{ROOT}layers.3.input_layernorm.weight": torch.randn(20).to(torch.bfloat16),
        f"{ROOT}layers.3.shared_head.norm.weight": torch.randn(20),
        f"{ROOT}layers.3.mlp.gate.calls": torch.tensor([2**40, -1]),
        f"{ROOT}layers.3.mlp.gate.flags": torch.tensor([True, False, True]),
    }
    holder = Holder()
    source = load_into(holder, write_folder(tmp_path / "source", tensors | aside))
    assert set(source.aside) == set(aside)
    save_from(holder, tmp_path / "written", source)
    assert_same_tensors(read_folder(tmp_path / "written"), tensors | aside)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "written" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_an_fp8_source_is_written_as_bfloat16_without_its_quantization(tmp_path: Path) -> None:
    tensors = published(drawn(dtype=torch.float32).state_dict())
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    names = [name for name in tensors if "mlp" in name and name.endswith("_proj.weight")]
    extra = f"{ROOT}layers.3.eh_proj.weight"
    stored = {**tensors, extra: torch.randn(20, 40), f"{ROOT}layers.3.enorm.weight": torch.ones(20)}
    for name in (*names, extra):
        stored[name] = (stored[name].float() * 3).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.tensor([[1 / 3]])
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    folder = write_folder(tmp_path / "source", stored, quantization_config=quantization)
    holder = Holder()
    save_from(holder, tmp_path / "written", load_into(holder, folder))
    expected = {name: value for name, value in stored.items() if not name.endswith("_scale_inv")}
    for name in (*names, extra):
        expected[name] = (stored[name].float() * torch.tensor(1 / 3)).to(torch.bfloat16)
    assert_same_tensors(read_folder(tmp_path / "written"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "written" / "config.json").read_text())
    assert "quantization_config" in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transformers_loads_a_drawn_model(tmp_path: Path, dtype: torch.dtype) -> None:
    holder = drawn(dtype=dtype)
    save_from(holder, tmp_path / "drawn")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "drawn", dtype=dtype, **PLAIN)
    assert isinstance(model, Glm5NextForConditionalGeneration)
    theirs = {name: value for name, value in model.state_dict().items() if "visual" not in name}
    mine = {
        name if "lm_head" in name else ROOT + name: v for name, v in _to_theirs(holder.state_dict()).items()
    }
    assert_same_tensors(theirs, mine)
    assert read_architecture(tmp_path / "drawn") == ARCHITECTURE


def test_a_text_only_folder_is_written_so_that_transformers_loads_its_head(tmp_path: Path) -> None:
    weights = drawn(dtype=torch.float32).state_dict()
    flat = {name.replace(ROOT, "model."): tensor for name, tensor in published(weights).items()}
    folder = write_folder(tmp_path / "source", flat)
    (folder / "config.json").write_text(json.dumps(TEXT | {"rope_theta": 10000.0, "dtype": "float32"}))
    holder = Holder()
    save_from(holder, tmp_path / "written", load_into(holder, folder))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "written", **PLAIN)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(model.model.language_model.norm.weight, weights["norm.weight"])
    assert read_architecture(tmp_path / "written") == ARCHITECTURE


def test_shards_are_cut_by_size_and_read_back(tmp_path: Path) -> None:
    holder = drawn(dtype=torch.float32)
    save_from(holder, tmp_path / "drawn", shard_bytes=10_000)
    shards = sorted(path.name for path in (tmp_path / "drawn").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert_same_tensors(read_folder(tmp_path / "drawn"), published(holder.state_dict()))
    again = Holder()
    load_into(again, tmp_path / "drawn")
    assert all(torch.equal(value, holder.state_dict()[name]) for name, value in again.state_dict().items())


def test_another_dtype_is_written_when_asked(tmp_path: Path) -> None:
    save_from(drawn(), tmp_path / "drawn", dtype=torch.bfloat16)
    found = read_folder(tmp_path / "drawn")
    assert found[f"{ROOT}norm.weight"].dtype == torch.bfloat16
    assert found[f"{ROOT}layers.0.self_attn.A_log"].dtype == torch.float32
    assert found[f"{ROOT}layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert json.loads((tmp_path / "drawn" / "config.json").read_text())["dtype"] == "bfloat16"


TIED = Architecture.from_hf(TEXT | {"tie_word_embeddings": True})


@pytest.mark.parametrize("both", [True, False], ids=["both names", "embedding only"])
def test_a_tied_head_is_one_parameter(tmp_path: Path, both: bool) -> None:
    tensors = published(drawn(TIED, torch.float32).state_dict())
    assert "lm_head.weight" not in tensors
    if both:
        tensors["lm_head.weight"] = tensors[f"{ROOT}embed_tokens.weight"].clone()
    folder = write_folder(tmp_path / "source", tensors, tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    holder = Holder(TIED)
    source = load_into(holder, folder)
    with torch.no_grad():
        holder.get_parameter("embed_tokens.weight").add_(1)
    save_from(holder, tmp_path / "written", source)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "written", dtype=torch.float32, **PLAIN)
    assert torch.equal(model.lm_head.weight, holder.get_parameter("embed_tokens.weight"))
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert ("lm_head.weight" in read_folder(tmp_path / "written")) == both


def test_a_tied_drawn_model_is_tied_in_transformers(tmp_path: Path) -> None:
    holder = drawn(TIED, torch.float32)
    save_from(holder, tmp_path / "drawn")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "drawn", **PLAIN)
    assert torch.equal(model.lm_head.weight, holder.get_parameter("embed_tokens.weight"))


def test_a_number_that_the_dtype_cannot_hold_is_not_saved(tmp_path: Path) -> None:
    tensors = {name: value.to(torch.float16) for name, value in published(drawn().state_dict()).items()}
    holder = Holder()
    source = load_into(holder, write_folder(tmp_path / "source", tensors))
    with torch.no_grad():
        holder.get_parameter("norm.weight")[3] = 70_000  # float16 ends at 65,504
    with pytest.raises(RunFailed, match=r"norm.weight: holds numbers that F16 cannot"):
        save_from(holder, tmp_path / "written", source)
    assert os.listdir(tmp_path) == ["source"]


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        save_from(drawn(), tmp_path / "used")
    assert os.listdir(tmp_path / "used") == ["notes.txt"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match="No space left on device"):
        save_from(drawn(), tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1000))
    with pytest.raises(RunFailed, match=r"the weights need [\d,]+ bytes, and 1,000 are free"):
        save_from(drawn(), tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_a_source_that_changed_under_way_is_noticed(tmp_path: Path) -> None:
    made_by_transformers(tmp_path / "source")
    holder = Holder()
    source = load_into(holder, tmp_path / "source")
    left = {
        name: tensor
        for name, tensor in read_folder(tmp_path / "source").items()
        if "visual.merger" not in name
    }
    save_file(left, tmp_path / "source" / "model.safetensors")
    with pytest.raises(UserError, match=r"visual.merger.* was there when the model was loaded"):
        save_from(holder, tmp_path / "written", source)
