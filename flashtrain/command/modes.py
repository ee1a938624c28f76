"""mode=evaluate, generate, export and passkey: what can be done with a run folder or a checkpoint.

Their settings are the run's own (its config.yaml) with the command line's on top, so no recipe needs to be named.
mode=evaluate and generate also take a model that no run has trained: of model.path, or of weights with a recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from omegaconf import OmegaConf

from flashtrain.announce import quieten, say
from flashtrain.command.compose import checked_settings, compose_settings, parse_overrides, readable_errors
from flashtrain.command.job import settle
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, find_checkpoint, read_settings
from flashtrain.settings.groups import forget_unheeded
from flashtrain.settings.settings import Settings, settings_config
from flashtrain.spec import WITHOUT_A_RUN, modes, task_of, tasks
from flashtrain.training.hardware import Hardware

OF_A_CHECKPOINT = ("evaluate", "generate", "export")  # of any task; others are registered

# Groups of conf/ that the command line may name here too, and the setting that each name stands for. Hydra composes
# nothing in these modes: the run's own settings are the ground.
GROUPS = {
    "attention": "name",
    "data": "source",
    "hardware": "accelerator",
    "logger": "name",
    "mask": "name",
    "memory": "checkpointing",
}


# What names a text.
_TEXT = {
    f"data{name}" for name in ("", ".source", ".path", ".validation_path", ".name", ".config", ".split", ".mixture")
}


def settings_from_checkpoint(words: Sequence[str]) -> Settings | None:
    """The settings for a mode that works on a trained model; None where the command line asks for another mode.

    Raises UserError when no such model is given.
    """
    given = {override.get_key_element().lstrip("+~"): override for override in parse_overrides(words)}
    mode = str(given["mode"].value()) if "mode" in given else "train"
    others = modes()
    if mode not in OF_A_CHECKPOINT and not (mode in others and others[mode].of_checkpoint):
        return None
    if "checkpoint" not in given:
        return _settings_of_weights(words, given, mode)
    folder, _ = find_checkpoint(str(given["checkpoint"].value()), prefer=BEST)
    own = read_settings(folder)
    config = settings_config(task_of(own).of_checkpoint(own))
    OmegaConf.set_struct(config, True)
    if "recipe" in given and str(given["recipe"].value()) != own.recipe:
        raise UserError(
            f"recipe={given['recipe'].value()}: the run in {folder} is of recipe={own.recipe}, whose settings "
            f"mode={mode} takes: leave recipe= out."
        )
    for key, override in given.items():
        if key == "recipe" or key.startswith("hydra"):
            continue
        own_name = GROUPS.get(key)
        value = override.value() if own_name is None else {own_name: override.value()}
        with readable_errors():
            replaces = isinstance(value, str) and OmegaConf.is_dict(OmegaConf.select(config, key))
        if replaces:
            raise UserError(
                f"{key}={value} replaces all {key} settings, and mode={mode} takes the checkpoint's own: leave it out, "
                f"or change single ones ({key}.NAME=VALUE)."
            )
        with readable_errors():
            OmegaConf.update(config, key, value)
    forget_unheeded(config.data, given)  # what the run was told of another source, or by a demo
    _score_all(config.data, given, mode)
    return checked_settings(config)


def _score_all(data: Any, given: Collection[str], mode: str) -> None:
    """A text that an evaluation names is scored whole: nothing of it is trained on here."""
    if mode == "evaluate" and _TEXT & set(given) and "data.validation_fraction" not in given:
        data.validation_fraction, data.streaming = 1.0, None
        if "data.validation_path" not in given:
            data.validation_path = None


def _settings_of_weights(words: Sequence[str], given: dict[str, Any], mode: str) -> Settings:
    """The settings where no run is given: a recipe's (recipe=hf with model.path), or those that weights name."""
    alone = mode in WITHOUT_A_RUN
    if alone and ("model.path" in given or {"weights", "recipe"} <= given.keys()):
        settings = compose_settings(words if "recipe" in given else [*words, "recipe=hf"])
        _score_all(settings.data, given, mode)
        if "model" in task_of(settings).heeds:
            for line in task_of(settings).fit_weights(settings, given):
                say(line)
            return settings
    if mode == "evaluate" and "weights" in given:
        for task in tasks().values():
            if (found := task.for_weights(words, given)) is not None:
                return found
    also = ", or model.path=..., a transformers folder; or recipe=... and weights=..." if alone else ""
    raise UserError(f"mode={mode} needs checkpoint=..., a run folder or a checkpoint in one{also}.")


def run_mode(settings: Settings) -> int:
    """Evaluate, generate, export or ask for passkeys, for the command. Returns the exit status."""
    found = of_checkpoint(settings)
    if "text" in found:
        print(found["text"])
    return 0


def of_checkpoint(settings: Settings) -> dict[str, Any]:
    """Evaluate, generate, export or ask for passkeys; what came of it (Task.run_mode)."""
    settings, hardware = on_this_machine(settings)
    return task_of(settings).run_mode(settings, hardware)


def on_this_machine(settings: Settings) -> tuple[Settings, Hardware]:
    """The settings of something that is asked of a trained model, as this machine can do it, and the machine."""
    quieten()
    settings.hardware.demo = "never"  # the model is the one that was given, on whatever machine
    return settle(settings, ())
