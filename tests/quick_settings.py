"""Settings of recipe=gpt2 with changes, composed by Hydra once: each composing takes a third of a second."""

from __future__ import annotations

import functools
from copy import deepcopy

import yaml

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
