"""Find the folders conf/ and recipes/ on this machine, and all recipes."""

from __future__ import annotations

import os
from pathlib import Path

from flashtrain.errors import UserError

RECIPES_VARIABLE = "FLASHTRAIN_RECIPES"

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_folder() -> Path:
    """Return the folder of Hydra's config groups. Raises UserError if the installation lacks it."""
    return _shipped_folder("conf")


def recipes_folder() -> Path:
    """Return the folder of flashtrain's own recipes. Raises UserError if the
    installation lacks it."""
    return _shipped_folder("recipes")


def recipe_files() -> dict[str, Path]:
    """Return the files of all recipes by name, sorted: NAME.yaml in flashtrain's folder and
    in the user's folders.

    The environment variable FLASHTRAIN_RECIPES lists the user's folders, separated as in PATH
    (os.pathsep). Raises UserError if a folder does not exist, or two files have the same name.
    """
    from_environment = [
        part for part in os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep) if part.strip()
    ]
    folders = [recipes_folder(), *map(_user_folder, from_environment)]
    found: dict[str, Path] = {}
    for folder in dict.fromkeys(folders):
        for file in sorted(folder.glob("*.yaml")):
            if file.stem in found:
                raise UserError(
                    f"two recipes are called '{file.stem}': {found[file.stem]} and {file}. "
                    "Rename one of the files."
                )
            found[file.stem] = file
    return dict(sorted(found.items()))


def recipe_description(path: str | Path) -> str:
    """Return a recipe's description: the first comment of its YAML file, without '#'; ""
    if there is no comment.

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
    # A wheel has them inside the package, a checkout next to it. The wheel's come first: an
    # installed package lies in site-packages, where a folder `conf` could be anyone's.
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
        raise UserError(
            f"{RECIPES_VARIABLE}: the recipe folder '{given}' does not exist or is not a folder."
        )
    return folder
