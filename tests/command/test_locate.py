"""flashtrain.files.shipped from a checkout; tests/test_packaging.py has it as a wheel and
as an editable install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashtrain.errors import UserError
from flashtrain.files import shipped as places

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own, with one recipe `ours`."""
    for name in ("flashtrain", "conf", "recipes/results"):
        (tmp_path / "root" / name).mkdir(parents=True)
    recipe(tmp_path / "root" / "recipes", "ours")
    monkeypatch.setattr(places, "_PACKAGE", tmp_path / "root" / "flashtrain")
    monkeypatch.delenv(places.RECIPES_VARIABLE, raising=False)
    return tmp_path / "root"


def recipe(folder: Path, name: str, text: str = "# a recipe\ncontext: 8\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_bare_pythonpath_finds_the_folders_from_any_working_directory(tmp_path: Path):
    code = "from flashtrain.files.shipped import *; print(conf_folder()); print(recipes_folder())"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == [str(CHECKOUT / "conf"), str(CHECKOUT / "recipes")]


def test_a_missing_folder_is_reported_with_both_places(shipped: Path):
    (shipped / "conf").rmdir()
    with pytest.raises(
        UserError, match=r"'conf' is neither at .*flashtrain.conf nor at .*root.conf"
    ):
        places.conf_folder()


def test_user_folders_come_from_the_environment(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe(shipped / "recipes" / "results", "not-a-recipe")
    (shipped / "recipes" / "README.md").write_text("no recipe either", encoding="utf-8")
    files = {name: recipe(tmp_path / name, name) for name in ("one", "two")}
    folders = [
        str(tmp_path / "one"),
        "",
        str(tmp_path / "two"),
        str(tmp_path / "one"),
        str(shipped / "recipes"),
    ]
    monkeypatch.setenv(places.RECIPES_VARIABLE, os.pathsep.join(folders))
    found = places.recipe_files()
    assert found == {"ours": shipped / "recipes" / "ours.yaml", **files}
    assert list(found) == sorted(found)


def test_two_recipes_of_one_name_are_refused_naming_both_files(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mine = recipe(tmp_path / "mine", "ours")
    monkeypatch.setenv(places.RECIPES_VARIABLE, str(tmp_path / "mine"))
    with pytest.raises(UserError) as caught:
        places.recipe_files()
    assert str(mine) in str(caught.value)
    assert str(shipped / "recipes" / "ours.yaml") in str(caught.value)


def test_a_user_folder_that_does_not_exist_is_named(shipped: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(places.RECIPES_VARIABLE, "/no/such/folder")
    with pytest.raises(UserError, match=r"FLASHTRAIN_RECIPES: the recipe folder '/no/such/folder'"):
        places.recipe_files()


def test_a_description_is_the_first_comment_line(tmp_path: Path):
    text = "# @package _global_\n\n## GPT-2 on real text\n# and more\ncontext: 8 # a length\n"
    assert places.recipe_description(recipe(tmp_path, "any", text)) == "GPT-2 on real text"


def test_every_shipped_recipe_describes_itself():
    files = places.recipe_files()
    assert [name for name, path in files.items() if not places.recipe_description(path)] == []
