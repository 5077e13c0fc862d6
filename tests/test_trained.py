"""Where a model's weights come from is what the recipe says, or nothing."""

import re
from types import SimpleNamespace

import pytest
import torch

from longstrand.bench._small_models import model, pack
from longstrand.config import ModelSection
from longstrand.errors import UserError
from longstrand.ops.native import build
from longstrand.state import save_checkpoint
from longstrand.trained import CheckpointWeights, Trained, model_source


def test_a_config_is_never_taken_for_weights_nor_a_folder_for_a_config(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(UserError, match=re.escape(f"model.path = {config}: a file, so without weights")):
        model_source(ModelSection(path=str(config)))
    with pytest.raises(
        UserError, match=re.escape(f"model.config = {tmp_path}: a folder; name it in model.path")
    ):
        model_source(ModelSection(config=str(tmp_path)))
    assert model_source(ModelSection(config=str(config))) == config
    assert model_source(ModelSection(path=str(tmp_path))) == tmp_path


def recorded(cpu="native", dtype="float32", tile=64):
    """What a run leaves of its settings."""
    run = SimpleNamespace(threads=torch.get_num_threads(), dtype=dtype)
    return SimpleNamespace(run=run, kernels=SimpleNamespace(cpu=cpu), memory=SimpleNamespace(tile=tile))


def test_a_run_trained_with_kernels_is_used_without_a_compiler_and_says_why(monkeypatch):
    def none_here(*_):
        raise build.CannotBuild("no C++ compiler: g++ is not on the PATH")

    monkeypatch.setattr("longstrand.ops.native.library.loaded_library", none_here)
    state = Trained(None, "a run", recorded(), 1, None).use_settings()
    assert str(state) == "portable (no C++ compiler: g++ is not on the PATH)"


@pytest.mark.parametrize("settings", [{"cpu": "portable"}, {"dtype": "float64"}], ids=str)
def test_a_run_without_kernels_is_used_without_them(settings):
    assert not Trained(None, "a run", recorded(**settings), 1, None).use_settings().used


def test_the_tile_is_that_of_training():
    assert Trained(None, "a run", recorded(tile=96), 1, None).tile == 96
    assert Trained(None, "a folder", None, 0, None).tile == 1024


def _saved_model(run, saved):
    tensors = {f"model.{name}": tensor for name, tensor in saved.state_dict().items()}
    return save_checkpoint(run, 4, tensors | {"optimizer.step": torch.zeros(1)}, {})


def test_a_model_is_filled_from_a_checkpoint_part_by_part(tmp_path):
    saved, other = model("KD", dtype=torch.float32), model("KD", dtype=torch.float32, seed=9)
    weights = CheckpointWeights(_saved_model(tmp_path, saved), other)
    assert weights.step == 4
    for part in ("embed_tokens", "layers.0", "layers.1", "lm_head", "norm"):
        module = other.get_submodule(part)
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        weights.fill({f"{part}.{name}": tensor for name, tensor in module.state_dict().items()})
        for name, tensor in other.state_dict().items():
            expected = saved.state_dict()[name] if name.startswith(f"{part}.") else before[name]
            assert torch.equal(tensor, expected), name
    with pytest.raises(UserError, match=r"has no model.layers.2.* it belongs to another recipe"):
        CheckpointWeights(tmp_path / "checkpoints/step_000004", model("KDK", dtype=torch.float32))


def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path):
    """In an indexer it would only select other pools: no log-probability shows it."""
    trained = model("KD", dtype=torch.float32)
    with torch.no_grad():
        trained.layers[1].self_attn.indexer.wk.weight[0, 0] = torch.nan
        assert trained.token_logprobs(pack((40,))).isfinite().all()
    weights = CheckpointWeights(_saved_model(tmp_path, trained), trained)
    says = r"step_000004: 1 of [\d,]+ values of layers.1.self_attn.indexer.wk.weight are not finite"
    with pytest.raises(UserError, match=says):
        weights.fill(trained.state_dict())
