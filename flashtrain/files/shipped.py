"""Find the folders conf/ and recipes/ on this machine, and all recipes."""

from __future__ import annotations

import os
from pathlib import Path

from flashtrain.errors import UserError

RECIPES_VARIABLE = "FLASHTRAIN_RECIPES"

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_folder() -> Path:
    """The folder of Hydra's config groups. Raises UserError if the installation lacks it."""
    return _shipped_folder("conf")


def recipes_folder() -> Path:
    """The folder of flashtrain's own recipes. Raises UserError if the installation lacks it."""
    return _shipped_folder("recipes")


def recipe_files() -> dict[str, Path]:
    """All recipes by name, sorted: NAME.yaml in flashtrain's folder, and in those of FLASHTRAIN_RECIPES.

    FLASHTRAIN_RECIPES separates folders as PATH does (os.pathsep). A folder that is named twice counts once.
    Raises UserError if a folder does not exist, or two files have the same name.
    """
    from_environment = [part for part in os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep) if part.strip()]
    folders = [recipes_folder(), *map(_user_folder, from_environment)]
    found: dict[str, Path] = {}
    for folder in dict.fromkeys(folders):
        for file in sorted(folder.glob("*.yaml")):
            if file.stem in found:
                raise UserError(
                    f"two recipes are called '{file.stem}': {found[file.stem]} and {file}. Rename one of the files."
                )
            found[file.stem] = file
    return dict(sorted(found.items()))


def recipe_description(path: str | Path) -> str:
    """A recipe's description: the first comment line of its YAML file, without '#'; "" if it has none.

    Hydra's own first line (`# @package _global_`) is skipped.
    """
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            text = text.lstrip("#").strip()
            if text and not text.startswith("@package"):
                return text
    return ""


def _shipped_folder(name: str) -> Path:
    # A wheel has them inside the package, a checkout next to it. The wheel's come first: an installed package lies in
    # site-packages, where a folder `conf` could be anyone's.
    candidates = [_PACKAGE / name, _PACKAGE.parent / name]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise UserError(
        f"flashtrain's folder '{name}' is neither at {candidates[0]} nor at {candidates[1]}. "
        "Install flashtrain again, or put the root of a complete checkout on PYTHONPATH."
    )


def _user_folder(given: str) -> Path:
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"{RECIPES_VARIABLE}: the recipe folder '{given}' does not exist or is not a folder.")
    return folder
