"""An exported run holds the weights of its newest checkpoint, each in the dtype the model came with."""

import json

import pytest
import torch
from safetensors import safe_open
from tiny_runs import checkpoints, recipe_in

from longstrand.errors import UserError
from longstrand.export import export_run
from longstrand.model import load_model, save_model
from longstrand.model.hf import save_from
from longstrand.train import sft
from longstrand.train.sft import train
from longstrand.trained import load_trained

FROZEN = 1 + 2**-10  # bfloat16 would make it 1


def _read(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _source(folder):
    """A bfloat16 folder whose float32 tensors hold a value that bfloat16 has not."""
    model = load_model(folder / "tiny.json", seed=4)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(tensor.bfloat16())
            if load_model(folder / "tiny.json", torch.bfloat16).state_dict()[name].dtype == torch.float32:
                tensor.fill_(FROZEN)
    save_from(model, folder / "source", dtype=torch.bfloat16)
    return folder / "source"


def test_weights_of_the_newest_checkpoint_are_exported_and_load_again(tmp_path):
    run = train(recipe_in(tmp_path, "train.steps=2", "evaluate.before=false"))
    out = export_run(run, tmp_path / "exported")
    trained, loaded = load_trained(run), load_model(out)
    assert trained.step == 2
    assert checkpoints(run)[-1] == "step_000002"
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert json.loads((out / "config.json").read_text())["text_config"]["hidden_size"] == 16


def test_every_tensor_keeps_its_sources_dtype_and_frozen_ones_their_bits(tmp_path):
    recipe_in(tmp_path)
    source = _source(tmp_path)
    text = (
        (tmp_path / "recipe.toml")
        .read_text()
        .replace(f'config = "{tmp_path}/tiny.json"', f'path = "{source}"')
    )
    (tmp_path / "recipe.toml").write_text(text)
    options = ("run.dtype=bfloat16", "train.steps=1", "train.indexer=frozen", "train.balance=none")
    run = train(
        recipe_in(tmp_path, *options, 'train.trainable=["dense", "experts"]', "evaluate.before=false")
    )
    before, after = _read(source), _read(export_run(run, tmp_path / "exported"))
    assert before.keys() == after.keys()
    kept = [name for name, tensor in before.items() if tensor.dtype == torch.float32]
    assert {name.rsplit(".", 1)[-1] for name in kept} >= {
        "A_log",
        "dt_bias",
        "hc_attn_base",
        "e_score_correction_bias",
    }
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        learns = ".mlp." in name and ".gate." not in name
        assert learns or torch.equal(after[name], tensor), name
    dense = [name for name in before if ".layers.0.mlp." in name]
    assert len(dense) == 3
    assert not any(torch.equal(after[name], before[name]) for name in dense)
    assert all(bool((after[name] == FROZEN).all()) for name in kept)


def test_an_existing_folder_is_not_written_over(tmp_path):
    run = train(recipe_in(tmp_path, "train.steps=1", "evaluate.before=false"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("")
    with pytest.raises(UserError, match="exists already"):
        export_run(run, tmp_path / "there")


def test_a_model_folder_is_no_run(tmp_path):
    recipe = recipe_in(tmp_path)
    folder = save_model(sft.prepare(recipe).model, tmp_path / "model")
    with pytest.raises(UserError, match="is a Hugging Face folder already"):
        export_run(folder, tmp_path / "out")
