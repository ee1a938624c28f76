"""The schema of a task: its settings with their types, and the errors about unknown
names and wrong values.

The schema is the dataclass of the task (Task.settings) and, as further fields, the dataclasses
that modes and users' programs register in the group "settings" (registry.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from flashtrain.errors import UserError, first_line, unknown
from flashtrain.files.yaml_files import literal
from flashtrain.registry import component, registered
from flashtrain.settings.aliases import RENAMED, answer, renamed
from flashtrain.settings.settings import Settings

INTERNAL = ("is_demo",)  # settings that the command sets itself
LISTS = {
    int: "a list of whole numbers: [1,2]",
    float: "a list of numbers: [0.1,0.2]",
    str: "a list: [one,another]",
}

# The settings' types and defaults. Made once a task, since that takes long; merging copies them.
_structured: Callable[[Any], DictConfig] = cache(OmegaConf.structured)


@cache
def schema_of(task: str) -> type[Settings]:
    """Return the dataclass of a task's settings, with the groups that modes
    and programs registered.

    Raises UserError for an unknown task, and if a registered group has the name of one
    of the task's settings.
    """
    own: type[Settings] = cast(Any, component("task", task)()).settings
    names = registered("settings")
    taken = {one.name for one in fields(own)} & set(names)
    if taken:
        raise UserError(
            f"the registered group of settings '{taken.pop()}' has the name of a setting of "
            f"task={task}. Register the group under another name."
        )
    groups = [(name, component("settings", name)) for name in names]
    made: list[Any] = [(name, group, field(default_factory=group)) for name, group in groups]
    whole = make_dataclass(own.__name__, [*made, ("task", str, field(default=task))], bases=(own,))
    whole.__module__, whole.__doc__ = own.__module__, own.__doc__
    return whole


def typed_settings(config: DictConfig) -> Settings:
    """Return a composed configuration as the settings of its task, each value
    converted to its declared type.

    Raises UserError naming the setting for an unknown key or a value of the wrong type.
    Does not call check().
    """
    task = str(config.get("task", Settings.task))
    for name in sorted(
        {name for name, equals, _ in (key.partition("=") for key in RENAMED) if equals}
    ):
        if line := renamed(name, OmegaConf.select(config, name)):
            raise UserError(line)
    try:
        merged = OmegaConf.merge(_structured(schema_of(task)), config)
        return cast(Settings, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise wrong_value(error, task) from error


def settings_config(settings: Settings) -> DictConfig:
    """Return settings as a configuration that can be changed; a `${...}` in a text stays a text."""
    return cast(DictConfig, OmegaConf.merge(_structured(type(settings)), literal(asdict(settings))))


@cache
def setting_names(task: str) -> tuple[str, ...]:
    """Return the dotted names of all settings of a task, including those inside groups."""
    return tuple(name for name, _, _ in _walk(schema_of(task), ""))


def all_settings() -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, dataclass field, type) of every setting of every task."""
    for task in registered("task"):
        yield from _walk(schema_of(task), "")


def _walk(group: type, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(group)
    for one in fields(cast(Any, group)):
        yield f"{prefix}{one.name}", one, hints[one.name]
        if is_dataclass(hints[one.name]):
            yield from _walk(hints[one.name], f"{prefix}{one.name}.")


def check_names(given: Mapping[str, Any], task: str) -> None:
    """Raise one UserError for all `given` settings (name -> value) that the task does not have or
    that are renamed."""
    names = set(setting_names(task))
    leaves = names - {name.rpartition(".")[0] for name in names}
    free = ("hydra", *(f"{leaf}." for leaf in leaves))  # what is no group may be a dictionary
    missing = {
        key: str(unknown_setting(key, task, value))
        for key, value in given.items()
        if key not in names and not key.startswith(free)
    }
    if lines := [
        line for key, value in given.items() if (line := renamed(key, value) or missing.get(key))
    ]:
        raise UserError(" ".join(lines))


def unknown_setting(given: str, task: str, value: Any = None) -> UserError:
    """Return the error for a setting that the task does not have, given with this value if it is
    known; it says what the setting is called here, or lists similar names."""
    names = [name for name in setting_names(task) if name not in INTERNAL]
    group = given.rpartition(".")[0]
    if group.endswith(".options") and group in names:
        return UserError(
            f"{given} is an option of a registered component. Add a plus: +{given}=..."
        )
    if line := renamed(given):
        return UserError(line)
    if others := [
        other for other in registered("task") if other != task and given in setting_names(other)
    ]:
        what = f"{given} is a setting of task={' and '.join(others)}, not of task={task}."
        return UserError(f"{what} {meant(given, names, value)}".rstrip())
    siblings = ", ".join(
        sorted(name for name in names if group and name.rpartition(".")[0] == group)
    )
    choices = "`python -m flashtrain --help` lists settings."
    if siblings:
        choices = f"Expected one of: {siblings}."
    return UserError(f"unknown setting '{given}'. {meant(given, names, value) or choices}")


def meant(given: str, names: Collection[str], value: Any = None) -> str:
    """Return "Use X.", "Did you mean 'X'?" or why there is none for an unknown setting, else "".

    Args:
        given: the name as it was given.
        names: the dotted names of the settings that exist.
        value: the value that it is given, if known.
    """
    if ours := answer(given, names, value):
        return ours
    group, _, last = given.rpartition(".")
    extra = {name for name in registered("settings") if name != group}  # of modes
    leaves: dict[str, list[str]] = {}
    # Those of the same group first.
    for name in sorted(names, key=lambda name: name.rpartition(".")[0] != group):
        if name.partition(".")[0] not in extra and not name.endswith(".name"):
            leaves.setdefault(name.rpartition(".")[2], []).append(name)
    near = [
        name
        for leaf in difflib.get_close_matches(last, leaves, n=2, cutoff=0.75)
        for name in leaves[leaf]
    ][:2]
    if near and near == leaves.get(last):
        return f"Use {' or '.join(near)}."
    return f"Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def wrong_value(error: OmegaConfBaseException, task: str, key: str = "") -> UserError:
    """Return the error for a value that OmegaConf refuses. `key`: the setting, if
    OmegaConf does not name it."""
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and error.full_key:
        given, entry = str(error.full_key), cast(Any, error.object_type)
        # Of a list, such as stages: OmegaConf merges an entry before it has a place.
        in_list = given == error.key and is_dataclass(entry) and entry is not schema_of(task)
        if in_list and not renamed(given):
            return unknown("key of a list's entry", given, [one.name for one in fields(entry)])
        return unknown_setting(given, task)
    key = str(error.full_key or key)
    expected = _expected(key, task) if isinstance(error, ValidationError) else ""
    said = first_line(error)
    if group := re.search(r"is not a subclass of (\w+)Settings. value: (\S+?)\.?$", said):
        name, value = group[1].lower(), group[2]
        return UserError(
            f"{name}: {value} is a choice of the group {name}: in a recipe it stands under "
            f"defaults, as `- override /{name}: {value}` before `- _self_`."
        )
    # Its value may be a password of the environment.
    if said.startswith("While dereferencing interpolation"):
        said = re.sub(r"Value '.*' of type", "what it stands for, of type", said)
    return UserError(f"{key or 'configuration'}: {said}.{expected}")


def _expected(key: str, task: str) -> str:
    """Return " Expected ..." with the form of a list if the setting `key` is a list, to end an
    error's line; else ""."""
    schema = _structured(schema_of(task))
    group, _, name = key.partition("[")[0].rpartition(".")  # of a list's entry the list
    parent = OmegaConf.select(schema, group) if group else schema
    node = parent._get_node(name) if isinstance(parent, DictConfig) and name in parent else None
    kind = LISTS.get(node._metadata.element_type) if isinstance(node, ListConfig) else None
    return "" if kind is None else f" Expected {kind}."
