"""Shapes by name: what is shipped, a slice of it, and configs of one's own."""

import json
from pathlib import Path

import pytest
from planned import REAL, SLICE, TOY

from longstrand.architecture import DSA, KDA
from longstrand.errors import UserError
from longstrand.plan.job import Job
from longstrand.plan.shapes import built_in_shapes, find_shape


def test_the_slice_is_the_first_four_layers_of_the_real_model():
    assert SLICE.layer_types == (KDA, KDA, KDA, DSA)
    assert SLICE.mlp_layer_types == ("dense", "dense", "dense", "sparse")
    assert "layers 0 to 3 of glm-5.3-flash" in find_shape("glm-5.3-flash-4-layers").source
    whole = {weight.name: weight.shape for weight in Job(REAL, 1024).weights()}
    part = {weight.name: weight.shape for weight in Job(SLICE, 1024).weights()}
    first = {n: s for n, s in whole.items() if not n.startswith("layers.") or int(n.split(".")[1]) < 4}
    assert part == first


def test_every_built_in_name_has_a_shape():
    assert set(built_in_shapes()) == {"glm-5.3-flash", "glm-5.3-flash-4-layers", "toy", "wide"}
    assert {name: find_shape(name).shape.num_hidden_layers for name in built_in_shapes()} == {
        "glm-5.3-flash": 45,
        "glm-5.3-flash-4-layers": 4,
        "toy": 4,
        "wide": 8,
    }


def test_a_config_and_a_folder_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TOY.to_hf() | {"vocab_size": 999}))
    as_file, as_folder = find_shape(str(tmp_path / "config.json")), find_shape(str(tmp_path))
    assert as_file.shape == as_folder.shape and as_file.shape.vocab_size == 999
    assert (as_file.is_folder, as_folder.is_folder) == (False, True)


def test_a_config_is_read_again_where_it_has_changed(tmp_path, monkeypatch):
    for folder, vocab_size in (("one", 300), ("two", 400)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        Path("config.json").write_text(json.dumps(TOY.to_hf() | {"vocab_size": vocab_size}))
        assert find_shape("config.json").shape.vocab_size == vocab_size
    Path("config.json").write_text(json.dumps(TOY.to_hf() | {"vocab_size": 500}))
    assert find_shape("config.json").shape.vocab_size == 500


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("glm-5.3-flsh", "did you mean glm-5.3-flash"),
        ("4-layers", "did you mean glm-5.3-flash-4-layers"),
        ("qwen", "Built in are glm-5.3-flash, toy, wide"),
        ("empty", "a folder without config.json"),
        (
            "nothing.json",
            "nothing.json: says no hidden_size and no num_hidden_layers, so not what model it is; give a model's",
        ),
        ("half.json", "half.json: says no hidden_size, so not what"),
        ("bare.json", "bare.json: says no hidden_size and no num_hidden_layers"),
        ("broken.json", "not valid JSON"),
        ("list.json", "holds no object"),
        ("other.json", "model_type = 'llama' is not supported"),
        ("~nobody_has_this_name/x", "no valid path"),
    ],
)
def test_what_is_no_shape_is_refused_in_one_line(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "nothing.json").write_text("{}")
    (tmp_path / "half.json").write_text('{"model_type": "glm5_next_text", "num_hidden_layers": 4}')
    (tmp_path / "bare.json").write_text('{"text_config": {}}')
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError) as refused:
        find_shape(name)
    assert says in str(refused.value) and "\n" not in str(refused.value)
