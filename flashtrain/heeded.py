"""Who heeds a setting: rules, and the conditions on settings in whose words they are written.

The framework's rules are in command/given.py. A task and a mode say by `heeds` which settings that not all have they
read; rules of a group's own are registered as `rules.NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flashtrain.settings.settings import Settings
from flashtrain.spec import modes, task_of, work_of, working_mode

Condition = Callable[[Settings], bool]

OF_TOKENS = (
    "memory.loss_chunk",
    "trainer.cuda_graphs",
    "trainer.tokens_per_step",
)  # what losses over a vocabulary heed

# What a command does, beside the modes' own names.
TRAIN = "train"  # once, or at several contexts (a study)
CHECKPOINT = "checkpoint"  # is asked of a checkpoint: mode=evaluate, generate, export, ...


class Rule(NamedTuple):
    """names: settings, or groups of settings, a space between two. heeded: under which settings. by: that in words."""

    names: str
    heeded: Condition
    by: str

    def names_setting(self, name: str) -> bool:
        """Whether the rule is about this setting, itself or through its group."""
        return any(name == own or name.startswith(f"{own}.") for own in self.names.split())


def does(*works: str, task: str | None = None) -> Condition:
    """Whether the command does one of these, with a task that heeds the setting or group `task` (None: with any)."""
    return lambda settings: bool(_works(settings) & set(works)) and (task is None or task_heeds(task)(settings))


def trains(task: str | None = None) -> Condition:
    """Whether the command trains, with a task that heeds the setting or group `task` (None: any)."""
    return does(TRAIN, task=task)


def task_heeds(name: str) -> Condition:
    """Whether the task says that it reads this setting or group."""
    return lambda settings: name in task_of(settings).heeds


def measures(name: str) -> Condition:
    """Whether the command does something else than train, and reads this setting or group."""

    def condition(settings: Settings) -> bool:
        mode = working_mode(settings)
        return mode is not None and name in mode.heeds(settings)

    return condition


def measures_nothing(settings: Settings) -> bool:
    mode = working_mode(settings)
    return mode is None or not mode.measures


def either(*conditions: Condition) -> Condition:
    return lambda settings: any(one(settings) for one in conditions)


def unless(exempt: Condition, condition: Condition) -> Condition:
    """The condition, except where `exempt` holds, which another rule is for."""
    return lambda settings: exempt(settings) or condition(settings)


def never(settings: Settings) -> bool:
    return False


def no_weights(settings: Settings) -> bool:
    return settings.weights is None


def runs_a_training(settings: Settings) -> bool:
    """Whether a measurement ends with a whole run of another recipe, which is told what this command was told."""
    mode = working_mode(settings)
    return mode is not None and mode.runs_a_training(settings)


def _works(settings: Settings) -> set[str]:
    """The command's work by its own name and by its kind."""
    work, mode = work_of(settings), modes().get(work_of(settings))
    kinds = {TRAIN} if mode is not None and mode.study else set()
    of_checkpoint = work in ("evaluate", "generate", "export") or (mode is not None and mode.of_checkpoint)
    return {work} | kinds | ({CHECKPOINT} if of_checkpoint else set())
