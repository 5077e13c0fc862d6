"""Where a model's weights come from is what the recipe says, or nothing."""

import re
from types import SimpleNamespace

import pytest
import torch

from longstrand.bench._small_models import model, pack
from longstrand.config import ModelSection
from longstrand.errors import UserError
from longstrand.model.load import require_finite
from longstrand.ops.native import build
from longstrand.trained import Trained, model_source


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


def test_a_model_with_a_weight_that_is_no_number_is_refused_by_name():
    """In an indexer it would only select other pools: no log-probability shows it."""
    trained = model("KD", dtype=torch.float32)
    with torch.no_grad():
        trained.layers[1].self_attn.indexer.wk.weight[0, 0] = torch.nan
        assert trained.token_logprobs(pack((40,))).isfinite().all()
    says = r"a model: 1 of [\d,]+ values of layers.1.self_attn.indexer.wk.weight are not finite"
    with pytest.raises(UserError, match=says):
        require_finite(trained.state_dict(), "a model")


def test_the_tile_is_that_of_training():
    assert Trained(None, "a run", recorded(tile=96), 1, None).tile == 96
    assert Trained(None, "a folder", None, 0, None).tile == 1024
