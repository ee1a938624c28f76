"""The command that gives a result of mode=ruler or mode=positions again."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce

from flashtrain.command.api import words_of
from flashtrain.command.compose import compose_settings
from flashtrain.report.rows import command_line
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import Settings

# What decides the rows besides the mode's own settings; of a run most of it is the run's own.
_ALWAYS = (
    "mode", "checkpoint", "context", "seed", "model.rope", "model.rope_factor", "model.rope_base",
    "model.interpolate_positions",
)  # fmt: skip
_OF_WEIGHTS = (
    "recipe", "weights", "model.path", "model.config", "model.options", "model.adapter",
    "model.adapter_path", "model.quantize", "data.tokenizer",
)  # fmt: skip


def scored_command(settings: Settings, *others: str) -> str:
    """Return the command with the settings that decide the rows.

    Args:
        others: further settings, or groups of settings, that do.
    """
    names = [*(() if settings.checkpoint is not None else _OF_WEIGHTS), *_ALWAYS]
    for name in others:
        group = getattr(settings, name, None)
        names += [name] if group is None else [f"{name}.{one.name}" for one in fields(group)]
    recipe = compose_settings(CommandLine.of([f"recipe={settings.recipe}"]))
    values = {}
    for name in names:
        one, default = (reduce(getattr, name.split("."), given) for given in (settings, recipe))
        if one is not None or default is not None:  # null is a word where the recipe has a value
            values[name] = one
    return command_line(words_of(values))
