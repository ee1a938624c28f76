"""Composes a command line's words to checked settings with Hydra; a mistake in them
becomes one readable line.

Hydra composes conf/config.yaml, its groups and a recipe. Recipes are not a folder on Hydra's search
path: each file of recipes/ (and of a user's own folders) is put into Hydra's ConfigStore as the
group `recipe`, placed at the top level, so that a recipe reads like a page of settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashtrain.errors import UserError, first_line, unknown
from flashtrain.files.shipped import conf_folder, recipe_files
from flashtrain.files.yaml_files import literal
from flashtrain.mode import check_settings
from flashtrain.registry import component
from flashtrain.settings.aliases import current_value, renamed
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.schema import (
    check_names,
    schema_of,
    setting_names,
    typed_settings,
    unknown_setting,
    wrong_value,
)
from flashtrain.settings.settings import Settings

CHOOSES = {"data": "source", "hardware": "accelerator"}  # group -> its choice, if not `name`
# group -> what a program registers, a choice of the group
REGISTERED = {one: one for one in ("model", "mask", "optimizer", "schedule")} | {"data": "source"}

# Of each the file, when that changed, and what it holds.
_recipes: dict[str, tuple[Path, int, dict[str, Any]]] = {}


def register_configs(line: CommandLine) -> str:
    """Register with Hydra every recipe, and conf/config.yaml with the config groups of the
    task that `line` chooses.

    Return the task's name, which is also that of the configuration to compose. Raises UserError if
    `line` names a setting that the task does not have.
    """
    store = ConfigStore.instance()
    for name, path in recipe_files().items():
        version = (path, path.stat().st_mtime_ns)
        if _recipes.get(name, ())[:2] != version:
            _recipes[name] = (*version, _read_recipe(name, path))
            store.store(group="recipe", name=name, node=_recipes[name][2], package="_global_")
    given = line.values
    task = str(given.get("task") or _task_of(current_value("recipe", str(given.get("recipe")))))
    own = {name.partition(".")[0] for name in setting_names(task)}
    check_names(given, task)
    # Of the groups that conf/config.yaml chooses a file of, the task's own.
    content = yaml.safe_load((conf_folder() / "config.yaml").read_text(encoding="utf-8"))
    chosen = [
        one
        for one in content["defaults"]
        if isinstance(one, str) or own & one.keys() or " " in next(iter(one))
    ]
    store.store(name=task, node={**content, "defaults": [{"schema": task}, *chosen]})
    store.store(group="schema", name=task, node=schema_of(task), package="_global_")
    return task


def _task_of(recipe: str) -> str:
    """Return the task that a recipe's file names or, if it names none, the recipes in its
    `defaults`."""
    content = _recipes[recipe][2] if recipe in _recipes else {}
    bases = [
        _task_of(base)
        for base in content.get("defaults", ())
        if isinstance(base, str) and base in _recipes
    ]
    return str(content.get("task", [Settings.task, *bases][-1]))


def compose_settings(words: Sequence[str]) -> Settings:
    """Compose the settings of these command-line words (key=value) with Hydra, and check them.
    Raises UserError for a wrong word or setting."""
    line = CommandLine.of(words)
    task = register_configs(line)
    with readable_errors(task), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose(task, overrides=list(line))
    if "trainer.steps" in line.by_name and config.trainer.epochs is not None:
        if "trainer.epochs" in line.by_name:
            raise UserError(
                "trainer.steps and trainer.epochs are both given. Set one: epochs decide the steps."
            )
        config.trainer.epochs = None  # the recipe's
    return checked_settings(config)


def checked_settings(config: DictConfig) -> Settings:
    """Return the checked settings of a composed configuration, without Hydra's own section. Raises
    UserError for a wrong setting."""
    with readable_errors(str(config.get("task"))):
        plain = OmegaConf.to_container(config, resolve=True)
    own = {key: value for key, value in cast(dict[str, Any], plain).items() if key != "hydra"}
    settings = typed_settings(OmegaConf.create(literal(own)))
    check_settings(settings)
    return settings


@contextmanager
def readable_errors(task: str = Settings.task) -> Iterator[None]:
    """Within the context, turn exceptions of Hydra and OmegaConf about a task's settings
    into a one-line UserError."""
    try:
        yield
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if line := renamed(group, name):
            raise UserError(line) from error
        known = error.options or ()
        if group in REGISTERED:
            component(REGISTERED[group], name, known, group)
        raise unknown(group or "configuration", name, known) from error
    except ConfigCompositionException as error:
        raise _composition_error(error, task) from error
    except OmegaConfBaseException as error:
        raise wrong_value(error, task) from error
    except HydraException as error:
        raise UserError(f"Hydra cannot read these settings: {first_line(error)}") from error


def _composition_error(error: ConfigCompositionException, task: str) -> UserError:
    text = str(error)
    if text.startswith("You must specify 'recipe'"):
        return UserError(
            f"no recipe given. Set recipe=NAME, one of: {', '.join(sorted(recipe_files()))}."
        )
    if text.startswith("Could not override '"):
        name = text.split("'")[1]
        cause = error.__cause__
        if name not in setting_names(task) or not isinstance(cause, OmegaConfBaseException):
            return unknown_setting(name, task)
        return wrong_value(cause, task, name)  # it exists, and something inside its value does not
    if text.startswith("Ambiguous value for argument"):
        given = text.splitlines()[0].split(" ", 4)[-1]
        return UserError(
            f"{given} lists several values. "
            "Add -m to sweep, or use brackets for a list: [one,another]."
        )
    chosen = re.search(r"Could not override '(\w+)'", text)  # in the defaults of a recipe
    if chosen and (line := renamed(chosen[1], "")):
        return UserError(line)
    cause = error.__cause__ or error.__context__  # of a recipe's own lines
    if isinstance(cause, OmegaConfBaseException):
        return wrong_value(cause, task)
    return UserError(f"Hydra cannot compose these settings: {first_line(error)}")


def _read_recipe(name: str, path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except yaml.YAMLError as error:
        raise UserError(f"recipe file {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"recipe file {path} must contain settings, one `name: value` a line.")
    return {**content, "recipe": name}
