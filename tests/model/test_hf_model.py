"""A model's way from a folder, through a training step, to a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import (
    ARCHITECTURE,
    ROOT,
    TEXT,
    assert_same_tensors,
    made_by_transformers,
    read_folder,
    write_folder,
)
from oracle import Oracle, draw_documents
from test_hf_save import mixed

from longstrand.data import Pack
from longstrand.errors import UserError
from longstrand.model import load_model, save_model
from longstrand.plan.parameters import keeps_float32

PACK = Pack.from_documents(draw_documents(ARCHITECTURE, [9, 14], seed=0))


def test_frozen_float32_tensors_survive_a_bfloat16_training_step(tmp_path: Path) -> None:
    """A07: 1 + 2^-10 would be 1 in bfloat16; the dtype of each tensor is the source's."""
    tensors = mixed()
    model = load_model(write_folder(tmp_path / "source", tensors), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not keeps_float32(name))
    model.token_logprobs(PACK).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad.to(parameter.dtype), alpha=0.1)
    save_model(model, tmp_path / "written")
    written = read_folder(tmp_path / "written")
    frozen = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert len(frozen) > 20
    assert_same_tensors({name: written[name] for name in frozen}, frozen)
    assert {name: t.dtype for name, t in written.items()} == {name: t.dtype for name, t in tensors.items()}
    assert not torch.equal(written[f"{ROOT}norm.weight"], tensors[f"{ROOT}norm.weight"])


def test_a_loaded_model_computes_what_transformers_does_and_is_written_back_alike(tmp_path: Path) -> None:
    made_by_transformers(tmp_path / "source")
    model = load_model(tmp_path / "source", dtype=torch.float64)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    documents = [PACK.tokens[:9], PACK.tokens[9:]]
    expected = Oracle(ARCHITECTURE, weights).run(documents).logprobs
    assert (model.token_logprobs(PACK) - expected).abs().max() < 1e-12
    save_model(model, tmp_path / "written")
    assert_same_tensors(read_folder(tmp_path / "written"), read_folder(tmp_path / "source"))


def test_a_drawn_model_is_written_in_float32_and_loaded_again(tmp_path: Path) -> None:
    model = load_model(TEXT, seed=3)
    save_model(model, tmp_path / "drawn")
    again = load_model(tmp_path / "drawn")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    assert {tensor.dtype for tensor in read_folder(tmp_path / "drawn").values()} == {torch.float32}


def test_an_unsupported_field_in_a_folders_config_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"n_group": 2}))
    with pytest.raises(UserError, match=r"n_group = 2"):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_a_config_file_that_holds_no_object_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(UserError, match=r"mine\.json: (not JSON|holds)"):
        load_model(tmp_path / "mine.json")
