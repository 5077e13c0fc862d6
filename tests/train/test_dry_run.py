"""A dry run refuses a folder that a run could not write, as the run would, and leaves no file in it."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from tiny_runs import recipe_in

from longstrand.config import load_recipe
from longstrand.errors import UserError
from longstrand.train.dry_run import check
from longstrand.train.run_folder import require_place
from longstrand.train.sft import train


def _long(folder):
    return folder / "deep" / ("n" * 300)


def _nowhere(folder):
    (folder / "link").symlink_to(folder / "nothing")
    return folder / "link"


def _under_nowhere(folder):
    return _nowhere(folder) / "run"


def _system(_):
    return "/proc/run"


IMPOSSIBLE = {"long": _long, "dangling": _nowhere, "under a dangling one": _under_nowhere, "system": _system}


def _files(folder):
    return {path: os.lstat(path).st_mtime_ns for path in folder.rglob("*") if not path.is_dir()} | {
        path: sorted(os.listdir(path)) for path in folder.rglob("*") if path.is_dir()
    }


def _in(folder, out, *overrides):
    recipe_in(folder)
    return load_recipe(folder / "recipe.toml", [f"run.out={out}", *overrides])


@pytest.mark.parametrize("place", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_a_run_could_not_write_a_dry_run_refuses(tmp_path, place):
    recipe = _in(tmp_path, place(tmp_path))
    before = _files(tmp_path)
    with pytest.raises(UserError, match=rf"^run\.out = {recipe.run.out}: .*; choose another run\.out$"):
        check(recipe)
    assert _files(tmp_path) == before
    with pytest.raises(UserError, match=rf"^run\.out = {recipe.run.out}: "):
        train(recipe)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be someone else for a moment")
def test_a_folder_of_someone_else_is_refused():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # which anyone may enter, unlike tmp_path
    folder.chmod(0o755)
    try:
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=rf"cannot be written in {folder} \(Permission denied\)"):
                require_place(folder / "runs/mine")
        finally:
            os.seteuid(0)
        assert os.listdir(folder) == []
    finally:
        folder.rmdir()


def test_a_folder_that_can_be_made_is_not_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = _in(tmp_path, "runs/of/mine")
    check(recipe)
    before = _files(tmp_path)  # with the data's cache, which a run would use
    check(recipe)
    assert _files(tmp_path) == before and not (tmp_path / "runs").exists()


def test_a_run_that_is_to_be_resumed_is_left_as_it_is(tmp_path, capsys):
    run = train(_in(tmp_path, tmp_path / "run"))
    before = _files(tmp_path)
    capsys.readouterr()
    check(_in(tmp_path, run), resume=True)
    assert _files(tmp_path) == before
    assert "--resume" not in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints/step_000005_old").mkdir(parents=True)  # not the name of a checkpoint
    check(_in(tmp_path, run), resume=True)
    said = f"--resume: run.out = {run} holds no checkpoint to go on from: the run would begin at step 0"
    assert said in capsys.readouterr().err
    (run / "log.txt").unlink()
    (run / "log.txt").mkdir()
    with pytest.raises(UserError, match=r"log\.txt: cannot be written; make it a writable file"):
        check(_in(tmp_path, run), resume=True)


def test_a_recipe_for_more_ranks_is_refused_where_it_is_to_run_and_else_warned_of(tmp_path, capsys):
    recipe = _in(tmp_path, "/proc/run", "parallel.data=2")
    check(recipe)
    assert re.search(
        r"warning: if it is to run on this machine: run\.out = /proc/run: cannot be written in /proc",
        capsys.readouterr().err,
    )
    with pytest.raises(UserError, match=r"run\.out = /proc/run: cannot be written in /proc"):
        check(recipe, here=True)
