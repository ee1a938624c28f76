"""From a composed configuration to Settings, and what is said of a setting that does not exist."""

from __future__ import annotations

import re
from dataclasses import asdict

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from flashtrain.errors import UserError, unknown
from flashtrain.files.foreign_files import literal
from flashtrain.settings.settings import Settings, settings_class


def typed_settings(config: DictConfig) -> Settings:
    """The composed configuration as Settings, each value converted to its declared type.

    Raises UserError naming the setting for an unknown key or a value of the wrong type. Does not call check().
    """
    schema = OmegaConf.structured(settings_class())
    try:
        merged = OmegaConf.merge(schema, config)
        settings = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise unknown_setting(str(error.full_key)) from error
    except ValidationError as error:
        raise UserError(f"{error.full_key or 'configuration'}: {first_line(error)}.") from error
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {first_line(error)}.") from error
    if not isinstance(settings, Settings):
        raise TypeError(f"expected Settings, built {type(settings).__name__}")
    return settings


def first_line(error: BaseException) -> str:
    """What a library says of an error, in a line, and without the value that an interpolation stands for: that may be
    a password of the environment, and a log is read by others."""
    text = str(error)
    if text.startswith("While dereferencing interpolation"):
        text = re.sub(r"Value '.*' of type", "what it stands for, of type", text, flags=re.DOTALL)
    return text.splitlines()[0] if text else type(error).__name__


def settings_config(settings: Settings) -> DictConfig:
    """Settings as a configuration that can be changed; `${...}` in a text is that text and asks for nothing."""
    config = OmegaConf.merge(OmegaConf.structured(settings_class()), literal(asdict(settings)))
    if not isinstance(config, DictConfig):
        raise TypeError(f"expected a DictConfig, built {type(config).__name__}")
    return config


def unknown_setting(given: str) -> UserError:
    """The error for a setting that does not exist: near matches from all, a list of those beside it."""
    group, _, _ = given.rpartition(".")
    names = setting_names()
    if group.endswith(".options") and group in names:
        return UserError(f"{given} is an option of a registered component: add a plus, +{given}=...")
    depth = group.count(".") + 1 if group in names else 0
    beside = [name for name in names if name.count(".") == depth and (depth == 0 or name.startswith(f"{group}."))]
    return unknown("setting", given, names, listed=beside)


def setting_names() -> list[str]:
    """Every dotted setting name, groups' own settings included."""
    return _dotted(OmegaConf.structured(settings_class()))


def _dotted(config: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key in map(str, config):
        name = f"{prefix}{key}"
        names.append(name)
        if OmegaConf.is_dict(config._get_node(key)) and config[key]:
            names.extend(_dotted(config[key], f"{name}."))
    return names
