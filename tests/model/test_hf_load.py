"""Reading Hugging Face folders: names, dtypes, FP8, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import ROOT, TEXT, Holder, drawn, load_into, made_by_transformers, published, read_folder
from checkpoints import write_folder as write
from safetensors.torch import save_file
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.bench.oracle import _to_theirs
from longstrand.errors import UserError

BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize("own_names", [False, True], ids=["published names", "transformers' names"])
def test_a_checkpoint_written_by_transformers_is_read(tmp_path: Path, own_names: bool) -> None:
    model = made_by_transformers(tmp_path, own_names)
    holder = Holder()
    source = load_into(holder, tmp_path)
    theirs = {name: value for name, value in model.state_dict().items() if "visual" not in name}
    mine = {
        name if "lm_head" in name else ROOT + name: v for name, v in _to_theirs(holder.state_dict()).items()
    }
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert set(source.aside) == {name for name in model.state_dict() if "visual" in name}
    assert source.casts == {}


@pytest.mark.parametrize("prefix", ["model.", "language_model.", ""])
def test_a_text_model_without_its_outer_part_is_read(tmp_path: Path, prefix: str) -> None:
    weights = drawn(dtype=torch.float32).state_dict()
    tensors = {name.replace(ROOT, prefix): tensor for name, tensor in published(weights).items()}
    holder = Holder()
    load_into(holder, write(tmp_path / "flat", tensors))
    assert all(torch.equal(value, weights[name]) for name, value in holder.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_plain_dtype_is_read_and_casts_are_counted_and_said(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {name: value.to(dtype) for name, value in drawn().state_dict().items()}
    holder = Holder()
    with caplog.at_level("INFO", "longstrand"):
        source = load_into(holder, write(tmp_path / "model", published(weights)))
    for name, value in holder.state_dict().items():
        assert torch.equal(value, weights[name].float()), name
    kind = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}.get(dtype)
    expected = {} if kind is None else {f"{kind} to float32": len(published(weights))}
    assert source.casts == expected
    said = [
        f"{tmp_path / 'model'}: {count} tensors were cast from {kind}" for kind, count in expected.items()
    ]
    assert caplog.messages == said


def test_fp8_blocks_are_multiplied_by_their_factors(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 300, "moe_intermediate_size": 130, "hidden_size": 150}
    architecture = Architecture.from_hf(TEXT | sizes)
    tensors = published(drawn(architecture).state_dict())
    tensors = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
    for name in list(tensors):
        if "mlp" in name and name.endswith("_proj.weight"):
            blocks = [-(-size // 128) for size in tensors[name].shape]
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(blocks) + 0.5
    text = {"text_config": TEXT | sizes, "quantization_config": BLOCKS}
    holder = Holder(architecture)
    source = load_into(holder, write(tmp_path / "fp8", tensors, **text))
    assert "F8_E4M3" in source.dtypes.values()
    for name in ("mlp.down_proj", "mlp.gate_proj"):
        stored = tensors[f"{ROOT}layers.0.{name}.weight"]
        factors = tensors[f"{ROOT}layers.0.{name}.weight_scale_inv"]
        found = holder.get_parameter(f"layers.0.{name}.weight")
        for row, column in ((0, 0), (127, 128), (128, 127), (stored.shape[0] - 1, stored.shape[1] - 1)):
            value = stored[row, column].float() * factors[row // 128, column // 128]
            assert found[row, column] == value
    expert, factor = (
        tensors[f"{ROOT}layers.1.mlp.experts.3.up_proj.weight{end}"] for end in ("", "_scale_inv")
    )
    fused = holder.get_parameter("layers.1.mlp.experts.gate_up_proj")
    assert fused[3, 130 + 129, 149] == expert[129, 149].float() * factor[1, 1]


Change = Callable[[Path], object]


def tensors_changed(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        tensors = read_folder(folder)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def replaced(name: str, tensor: Tensor) -> Change:
    return tensors_changed(lambda tensors: tensors.update({name: tensor}))


def removed(name: str) -> Change:
    return tensors_changed(lambda tensors: tensors.pop(name))


def cut(bytes_left: Callable[[int], int]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[: bytes_left(path.stat().st_size)])

    return apply


def sharded(folder: Path) -> None:
    """Two shards and an index."""
    tensors = read_folder(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + ('layers.0' in name)}.safetensors" for name in tensors}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def shard_lost(folder: Path) -> None:
    sharded(folder)
    (folder / "model-2.safetensors").unlink()


def both_kinds(folder: Path) -> None:
    tensors = read_folder(folder)
    sharded(folder)
    save_file(tensors, folder / "model.safetensors")


def index_nested(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


def index_broken(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def config_lost(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_not_an_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def fp8(scale: Tensor | None, entry: bool = True) -> Change:
    name = f"{ROOT}layers.0.mlp.up_proj.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        if scale is not None:
            tensors[f"{name}_scale_inv"] = scale

    def apply(folder: Path) -> None:
        tensors_changed(change)(folder)
        config = json.loads((folder / "config.json").read_text())
        extra = {"quantization_config": BLOCKS} if entry else {}
        (folder / "config.json").write_text(json.dumps(config | extra))

    return apply


def tied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def whole_layer_more(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
        tensors.update(
            {name.replace(".layers.2.", ".layers.3."): tensor.clone() for name, tensor in last.items()}
        )

    tensors_changed(change)(folder)


NORM = f"{ROOT}norm.weight"
UP = f"{ROOT}layers.0.mlp.up_proj.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (removed(UP), f"{UP} is missing"),
    "the nearest name is shown": (
        tensors_changed(
            lambda t: t.update({f"{ROOT}layers.1.mlp.gate.bias": t.pop(f"{ROOT}layers.1.mlp.gate.weight")})
        ),
        f"the nearest name is {ROOT}layers.1.mlp.gate.bias",
    ),
    "an expert is missing": (
        removed(f"{ROOT}layers.1.mlp.experts.3.up_proj.weight"),
        f"{ROOT}layers.1.mlp.experts.3.up_proj.weight is missing",
    ),
    "the embedding is missing": (
        removed(f"{ROOT}embed_tokens.weight"),
        f"{ROOT}embed_tokens.weight is missing",
    ),
    "the head is missing": (removed("lm_head.weight"), "lm_head.weight is missing"),
    "a tensor is extra": (
        replaced(f"{ROOT}layers.0.mlp.up_proj.bias", torch.zeros(28)),
        f"{ROOT}layers.0.mlp.up_proj.bias is not a tensor of this model; the nearest name is {UP}",
    ),
    "a layer is extra": (whole_layer_more, f"{ROOT}layers.3."),
    "a tensor has another shape": (replaced(NORM, torch.ones(21)), f"{NORM} has shape [21]"),
    "a matrix is transposed": (replaced(UP, torch.ones(20, 28)), "[20, 28], but config.json means [28, 20]"),
    "a tensor holds integers": (replaced(NORM, torch.ones(20, dtype=torch.int32)), f"{NORM} is I32"),
    "a tensor is another FP8": (replaced(UP, torch.ones(28, 20).to(torch.float8_e5m2)), f"{UP} is F8_E5M2"),
    "a tensor is not finite": (replaced(NORM, torch.full((20,), float("nan"))), f"{NORM} holds numbers"),
    "a tensor is beyond float32": (
        replaced(NORM, torch.full((20,), 1e300, dtype=torch.float64)),
        f"{NORM} holds numbers beyond float32",
    ),
    "the file is cut by a byte": (cut(lambda size: size - 1), "not a whole safetensors file"),
    "the file is cut in its header": (cut(lambda _: 100), "not a whole safetensors file"),
    "the file is empty": (cut(lambda _: 0), "not a whole safetensors file"),
    "a shard is missing": (shard_lost, "model-2.safetensors: this shard is missing"),
    "the index is not JSON": (index_broken, "model.safetensors.index.json: not JSON"),
    "the index is nested without end": (index_nested, "model.safetensors.index.json: not JSON"),
    "there are shards and a single file": (both_kinds, "both model.safetensors and"),
    "there is a pickle only": (only_pickle, "only pytorch_model.bin; the weights must be model.safetensors"),
    "there is no config": (config_lost, "config.json: no such file"),
    "the config is a list": (config_not_an_object, "config.json: holds list, must hold an object"),
    "an FP8 tensor has no factors": (fp8(None), f"{UP}_scale_inv is missing"),
    "the factors have another shape": (fp8(torch.ones(2, 1)), f"{UP}_scale_inv is F32 [2, 1]"),
    "the factors are BF16": (fp8(torch.ones(1, 1).bfloat16()), f"{UP}_scale_inv is BF16"),
    "the config does not know of FP8": (fp8(torch.ones(1, 1), entry=False), "no quantization_config"),
    "tied tensors differ": (tied, "lm_head.weight differs from embed_tokens.weight"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    folder = write(tmp_path / "model", published(drawn(dtype=torch.float32).state_dict()))
    change, message = WRONG[case]
    change(folder)
    with pytest.raises(UserError) as error:
        load_into(Holder(Architecture.from_hf(_config(folder))), folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert re.search("; |, must|, but", str(error.value)), "no rule or remedy"


def test_weights_that_are_no_file_are_refused_as_what_they_are(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", published(drawn(dtype=torch.float32).state_dict()))
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "moved")
    weights.mkdir()
    with pytest.raises(UserError, match=r"model.safetensors: a folder, must be a file; copy it again"):
        load_into(Holder(), folder)
    weights.rmdir()
    weights.symlink_to("blobs/none")
    with pytest.raises(UserError, match=r"model.safetensors: links to blobs/none, which is not there; copy"):
        load_into(Holder(), folder)


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", published(drawn(dtype=torch.float32).state_dict()))
    sharded(folder)
    index = folder / "model.safetensors.index.json"
    right = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": right | {NORM: "model-2.safetensors"}}))
    with pytest.raises(UserError, match=r"model-2.safetensors: .*norm.weight is not in this shard"):
        load_into(Holder(), folder)
    index.write_text(json.dumps({"weight_map": {name: file for name, file in right.items() if name != NORM}}))
    with pytest.raises(UserError, match=r"model-1.safetensors: .*norm.weight is in this shard, although"):
        load_into(Holder(), folder)
    index.write_text(json.dumps({"weight_map": right | {NORM: 2}}))
    with pytest.raises(UserError, match=r"weight_map has 2 for .*norm.weight; it must name a shard's file"):
        load_into(Holder(), folder)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(UserError, match="weight_map is missing or empty"):
        load_into(Holder(), folder)
    index.write_text(json.dumps({"weight_map": right}))
    load_into(Holder(), folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        load_into(Holder(), tmp_path / "nowhere")


def _config(folder: Path) -> dict[str, object]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return TEXT
    return config if isinstance(config, dict) else TEXT
