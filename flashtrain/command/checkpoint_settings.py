"""The settings of a mode that works on a trained model: mode=evaluate, generate, export ...

They are the run's own (its config.yaml) with the command line's on top, so no recipe is named. The
settings of resume=RUN are made in the same way. mode=evaluate, generate and modes that say so
(Mode.of_weights) also use a model that no run has trained: that of model.path, or of `weights` with
a recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flashtrain.announce import quieten, say
from flashtrain.command.compose import CHOOSES, checked_settings, compose_settings, readable_errors
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, LAST, find_checkpoint, read_settings, settings_at
from flashtrain.mode import is_of_checkpoint, modes
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.schema import check_names, settings_config
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of, tasks

WITHOUT_A_RUN = ("evaluate", "generate")  # what also takes a language model that no run has trained

# Groups of conf/ that the command line may name here too, and the setting that each name stands
# for. Hydra composes nothing in these modes: the run's own settings are the ground.
GROUPS = {
    group: CHOOSES.get(group, "name")
    for group in ("attention", "data", "hardware", "logger", "mask")
}
_OF_A_TEXT = ("path", "validation_path", "name", "config", "mixture", "split")
# Settings of one choice of a group: with another choice than the run's they start
# from their defaults.
_OF_A_CHOICE = {
    "data": (*_OF_A_TEXT, "dtype", "end_of_text", "options", "length_weights"),
    "mask": ("window", "chunk", "prefix", "options"),
}
# What names a text.
_TEXT = {"data", "data.source", *(f"data.{name}" for name in _OF_A_TEXT)}


def settings_from_checkpoint(words: Sequence[str]) -> Settings:
    """Return the checked settings of the run that checkpoint= or resume= names, with `words`
    (key=value) on top. Raises UserError if there is no such run, or a word does not suit it."""
    quieten()  # before transformers is imported
    line = CommandLine.of(words)
    given = line.by_name
    mode = str(given["mode"].value()) if "mode" in given else "train"
    named = "checkpoint" if is_of_checkpoint(mode) else "resume"
    if named not in given:
        return _settings_of_weights(line, mode)
    prefer = BEST if named == "checkpoint" else LAST
    folder, found = find_checkpoint(str(given[named].value()), prefer=prefer, setting=named)
    own = settings_at(folder, found) if named == "checkpoint" else read_settings(folder)
    config = settings_config(own)
    OmegaConf.set_struct(config, True)
    if named == "resume":
        config.hardware.demo = "never"  # the run's own model, on whatever machine
        config.trainer.epochs = None if "trainer.steps" in given else own.trainer.epochs
    if "recipe" in given and str(given["recipe"].value()) != own.recipe:
        raise UserError(
            f"recipe={given['recipe'].value()}: the run in {folder} is of recipe={own.recipe}, "
            f"whose settings mode={mode} uses. Remove recipe=..., or give a run of that recipe."
        )
    check_names({name: one.value() for name, one in given.items()}, own.task)
    for key, override in given.items():
        if key == "recipe" or key.startswith("hydra"):
            continue
        own_name = GROUPS.get(key)
        value = override.value() if own_name is None else {own_name: override.value()}
        with readable_errors(own.task):
            if isinstance(value, str) and OmegaConf.is_dict(OmegaConf.select(config, key)):
                raise UserError(
                    f"{key}={value} replaces all {key} settings, and {named}=... uses those of "
                    f"its run. Remove {key}={value}, or change single ones ({key}.NAME=VALUE)."
                )
            OmegaConf.update(config, key, value)
    _begin_anew(own, config, given)
    _score_all(config, given, mode)
    return checked_settings(config)


def _begin_anew(own: Settings, config: DictConfig, given: Collection[str]) -> None:
    """Reset the settings of the run's own text source or mask to defaults where another one is
    `given`."""
    for group, names in _OF_A_CHOICE.items():
        key = GROUPS[group]
        if {group, f"{group}.{key}"} & set(given) and config[group][key] != getattr(
            getattr(own, group), key
        ):
            defaults = type(getattr(own, group))()
            for name in names:
                if f"{group}.{name}" not in given:
                    config[group][name] = getattr(defaults, name)


def _score_all(config: Any, given: Collection[str], mode: str) -> None:
    """Change `config` so that mode=evaluate, or a registered mode, scores the whole of a text that
    the command line names."""
    if (
        (mode == "evaluate" or (mode in modes() and is_of_checkpoint(mode)))
        and _TEXT & set(given)
        and "data.validation_fraction" not in given
    ):
        data = config.data
        data.validation_fraction, data.streaming = 1.0, None
        if "data.validation_tokens" not in given:
            data.validation_tokens = None
        if "data.validation_path" not in given:
            data.validation_path = None


def _settings_of_weights(line: CommandLine, mode: str) -> Settings:
    """Return the settings of a mode without a run: a recipe's (recipe=hf if model.path alone is
    given), or those that `weights` suggest. Raises UserError if nothing names a model."""
    other = modes().get(mode)
    given, alone = line.by_name, mode in WITHOUT_A_RUN or (other is not None and other.of_weights)
    anew = other is not None and other.of_recipe and {"model.config", "recipe"} & given.keys()
    if alone and (anew or "model.path" in given or {"weights", "recipe"} <= given.keys()):
        settings = compose_settings(line if "recipe" in given else [*line, "recipe=hf"])
        if "generate" in task_of(settings).modes:
            _score_all(settings, given, mode)
            for one in task_of(settings).suit_weights(settings, given):
                say(one)
            return settings
    if mode == "evaluate" and "weights" in given:
        for task in tasks().values():
            if (found := task.for_weights(line)) is not None:
                return found
    also = (
        ", or model.path=..., a transformers folder; or recipe=... and weights=..." if alone else ""
    )
    raise UserError(f"mode={mode} needs checkpoint=..., a run folder or a checkpoint in one{also}.")
