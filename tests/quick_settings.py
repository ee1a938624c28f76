"""Settings that Hydra composes once: each composing takes a third of a second, and most tests ask for the same."""

from __future__ import annotations

import functools
import os
from copy import deepcopy
from typing import Any

import yaml
from omegaconf import DictConfig

from flashtrain.command import compose
from flashtrain.command.compose import compose_settings
from flashtrain.settings.settings import Settings

GROUPS = {"model": "name", "optimizer": "name", "attention": "name", "memory": "checkpointing"}


@functools.cache
def _composed() -> Settings:
    return compose_settings(["recipe=gpt2"])


def settings_of(*words: str) -> Settings:
    """As compose_settings(["recipe=gpt2", *words]) for dotted settings and for the names in GROUPS; checked."""
    settings = deepcopy(_composed())
    for word in words:
        key, value = word.split("=", 1)
        *path, last = (f"{key}.{GROUPS[key]}" if key in GROUPS else key).split(".")
        group = functools.reduce(getattr, path, settings)
        assert hasattr(group, last), key
        setattr(group, last, yaml.safe_load(value))
    settings.check()
    return settings


def compose_once() -> None:
    """Let compose_settings keep what Hydra composes of some words, for whoever gives the same words again.

    The settings are a copy each time and are checked anew. Hydra is asked again after a mistake, where a recipe's file
    has changed, and about recipes of a user's own, which may ask for variables of the environment.
    """
    by_hydra, checked = compose.compose, compose.checked_settings
    composed: dict[Any, DictConfig] = {}
    made: dict[int, tuple[DictConfig, Settings]] = {}

    def kept_config(name: str, overrides: list[str]) -> DictConfig:
        if "FLASHTRAIN_RECIPES" in os.environ or any("$" in word for word in overrides):
            return by_hydra(name, overrides=overrides)
        key = (name, tuple(overrides), str(compose.conf_folder()), tuple(compose._registered.items()))
        if key not in composed:
            composed[key] = by_hydra(name, overrides=overrides)
            made[id(composed[key])] = composed[key], checked(composed[key])
        return composed[key]

    def kept_settings(config: DictConfig) -> Settings:
        if id(config) not in made:
            return checked(config)
        settings = deepcopy(made[id(config)][1])
        compose.check_settings(settings)
        return settings

    compose.compose, compose.checked_settings = kept_config, kept_settings
