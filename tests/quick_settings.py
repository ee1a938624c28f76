"""Settings that Hydra composes once: each composing takes a third of a second, and most
tests ask for the same."""

from __future__ import annotations

import functools
import os
import re
import sys
from copy import deepcopy
from importlib.metadata import entry_points
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from flashtrain import registry
from flashtrain.command import compose
from flashtrain.command.compose import compose_settings
from flashtrain.mode import check_settings
from flashtrain.settings.settings import Settings

GROUPS = {"model": "name", "optimizer": "name", "attention": "name"}


@functools.cache
def _composed() -> Settings:
    return compose_settings(["recipe=gpt2"])


def settings_of(*words: str) -> Settings:
    """As compose_settings(["recipe=gpt2", *words]) for dotted settings and for the
    names in GROUPS; checked."""
    settings = deepcopy(_composed())
    for word in words:
        key, value = word.split("=", 1)
        *path, last = (f"{key}.{GROUPS[key]}" if key in GROUPS else key).split(".")
        group = functools.reduce(getattr, path, settings)
        assert hasattr(group, last), key
        setattr(group, last, yaml.safe_load(value))
    check_settings(settings)
    return settings


class QuickHydra:
    """Stands before compose_settings' own calls of Hydra, and asks it once for each
    choice of recipe and groups.

    Single settings (`trainer.steps=3`) are then put in as Hydra does it, by its own function. That
    is half of the time of a tiny training run. Hydra itself is asked where any other word is given
    (with a plus, a tilde, `${...}`, several values), after every mistake, so that its errors are
    its own, and about recipes of a user's own.
    """

    def __init__(self) -> None:
        self.by_hydra, self.structured = compose.compose, OmegaConf.structured
        self.parse = functools.lru_cache(4096)(
            lambda word: OverridesParser.create().parse_override(word)
        )
        self.composed: dict[Any, DictConfig] = {}
        self.schemas: dict[type, DictConfig] = {}

    def serve(self) -> None:
        compose.compose, OmegaConf.structured = self.compose, self.schema_of
        # Which packages offer something to a registry is read from all that are
        # installed, at every question.
        found = functools.lru_cache(lambda path, group: entry_points(group=group))
        registry.entry_points = lambda group: found(tuple(sys.path), group)

    def compose(self, name: str, overrides: list[str]) -> DictConfig:
        plain = all(re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)*=[^$]*", word) for word in overrides)
        if not plain or "FLASHTRAIN_RECIPES" in os.environ:
            return self.by_hydra(name, overrides=overrides)
        choices = [word for word in overrides if self._chooses(word)]
        try:
            single = [self.parse(word) for word in overrides if word not in choices]
            if any(override.is_sweep_override() for override in single):
                return self.by_hydra(name, overrides=overrides)
            files = ((recipe, *file[:2]) for recipe, file in compose._recipes.items())
            key = (name, *choices, str(compose.conf_folder()), *files)
            if key not in self.composed:
                self.composed[key] = self.by_hydra(name, overrides=choices)
            config = deepcopy(self.composed[key])
            ConfigLoaderImpl._apply_overrides_to_config(single, config)
        except Exception:  # noqa: BLE001 - whatever it is, Hydra says it in its own words
            return self.by_hydra(name, overrides=overrides)
        return config

    def _chooses(self, word: str) -> bool:
        """Does the word choose a recipe or the file of a group, or is it for Hydra itself?"""
        key = word.partition("=")[0]
        return key == "recipe" or key.startswith("hydra") or (compose.conf_folder() / key).is_dir()

    def schema_of(self, value: Any, *arguments: Any, **options: Any) -> Any:
        """A task's schema is only ever merged into, which copies it."""
        if not (isinstance(value, type) and issubclass(value, Settings)) or arguments or options:
            return self.structured(value, *arguments, **options)
        if value not in self.schemas:
            self.schemas[value] = self.structured(value)
        return self.schemas[value]
