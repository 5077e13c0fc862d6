"""What run.toml holds does not depend on where or how the run was started."""

import torch
from tiny_runs import recipe_in

from longstrand.config import load_recipe
from longstrand.ops.native import NativeState, native_state
from longstrand.train.run_folder import MAY_CHANGE, open_run, resolve_recipe, write_recipe


def test_paths_are_absolute_and_names_of_shipped_things_stay(tmp_path, monkeypatch):
    recipe_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = ["run.out=here", "data.sources.0.path=*.fa", "data.cache=cache", "model.config=tiny.json"]
    resolved = resolve_recipe(load_recipe(tmp_path / "recipe.toml", relative))
    assert resolved.run.out == str(tmp_path / "here")
    assert resolved.data.sources[0].path == str(tmp_path / "*.fa")
    assert resolved.data.cache == str(tmp_path / "cache")
    assert resolved.model.config == str(tmp_path / "tiny.json")
    assert resolved.data.tokenizer == "bases"
    assert resolve_recipe(load_recipe(tmp_path / "recipe.toml", ["model.config=toy"])).model.config == "toy"


def test_a_dtype_without_kernels_runs_in_plain_torch_and_says_so(tmp_path):
    given = recipe_in(tmp_path, "run.dtype=float64", "kernels.cpu=auto")
    assert resolve_recipe(given).kernels.cpu == "portable"
    assert native_state() == NativeState(False, "asked for")


def test_resolving_twice_changes_nothing(tmp_path):
    resolved = resolve_recipe(recipe_in(tmp_path))
    assert resolve_recipe(resolved) == resolved


def test_what_is_written_reads_back_as_the_resolved_recipe(tmp_path):
    with open_run(recipe_in(tmp_path), resume=False) as (run, resolved):
        write_recipe(run, resolved)
    assert load_recipe(run / "run.toml") == resolved


def test_a_run_keeps_the_threads_that_it_began_with(tmp_path):
    recipe = recipe_in(tmp_path, "run.threads=none")
    torch.set_num_threads(1)
    with open_run(recipe, resume=False) as (run, resolved):
        assert resolved.run.threads == 1
        write_recipe(run, resolved)
    torch.set_num_threads(2)
    try:
        with open_run(recipe, resume=True) as (_, resolved):
            assert resolved.run.threads == 1
    finally:
        torch.set_num_threads(1)


def test_a_folder_may_move_between_two_sittings(tmp_path):
    with open_run(recipe_in(tmp_path), resume=False) as (run, resolved):
        write_recipe(run, resolved)
    run.rename(tmp_path / "moved")
    with open_run(recipe_in(tmp_path, out="moved"), resume=True) as (run, resolved):
        assert run == tmp_path / "moved"
        assert resolved.run.out == str(run)
    assert "run.out" in MAY_CHANGE


def test_the_folder_is_free_again_once_it_is_closed(tmp_path):
    for _ in range(2):
        with open_run(recipe_in(tmp_path), resume=False):
            pass
