"""mode=evaluate, generate, export and passkey: what can be done with a run folder or a checkpoint.

Their settings are the run's own (its config.yaml) with the command line's on top, so no recipe needs to be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from flashtrain.announce import quieten
from flashtrain.command.compose import checked_settings, parse_overrides, readable_errors
from flashtrain.command.job import settle
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, find_checkpoint, read_settings
from flashtrain.settings.groups import forget_unheeded
from flashtrain.settings.settings import Settings, settings_config
from flashtrain.spec import modes, task_of, tasks
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


def settings_from_checkpoint(words: Sequence[str]) -> Settings | None:
    """The settings for a mode that works on a checkpoint; None where the command line asks for another mode.

    Raises UserError when no checkpoint is given.
    """
    given = {override.get_key_element().lstrip("+~"): override for override in parse_overrides(words)}
    mode = str(given["mode"].value()) if "mode" in given else "train"
    others = modes()
    if mode not in OF_A_CHECKPOINT and not (mode in others and others[mode].of_checkpoint):
        return None
    if mode == "evaluate" and "weights" in given and "checkpoint" not in given:
        found = (task.for_weights(words, given) for task in tasks().values())
        return next(filter(None, found), None)
    if "checkpoint" not in given:
        raise UserError(f"mode={mode} needs checkpoint=..., a run folder or a checkpoint in one.")
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
    return checked_settings(config)


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
    """The settings of something that is asked of a checkpoint, as this machine can do it, and the machine."""
    quieten()
    settings.hardware.demo = "never"  # the model is the checkpoint's, on whatever machine
    return settle(settings, ())
