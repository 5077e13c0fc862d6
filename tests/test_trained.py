"""Where a model's weights come from is what the recipe says, or nothing."""

import re

import pytest

from longstrand.config import ModelSection
from longstrand.errors import UserError
from longstrand.trained import model_source


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
