"""What a command does, as conditions on its settings: the words that the tables of rules are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flashtrain.settings.settings import Settings
from flashtrain.spec import work_of

Condition = Callable[[Settings], bool]

# The tasks by a name that fits into a table.
LANGUAGE, CLASSES, MASKED, TUNING = "language_model", "classification", "masked_language_model", "fine_tuning"
TRAININGS = ("train", "lengths")
OF_A_CHECKPOINT = ("evaluate", "generate", "export", "passkey")


class Rule(NamedTuple):
    """names: settings, or groups of settings, a space between two. heeded: under which settings. by: that in words."""

    names: str
    heeded: Condition
    by: str

    def names_setting(self, name: str) -> bool:
        """Whether the rule is about this setting, itself or through its group."""
        return any(name == own or name.startswith(f"{own}.") for own in self.names.split())


def does(*works: str, task: tuple[str, ...] = ()) -> Condition:
    """Whether the command does one of these, with one of these tasks (none: with any)."""
    return lambda settings: work_of(settings) in works and (not task or settings.task in task)


def trains(*tasks: str) -> Condition:
    """Whether the command trains one of these tasks, once or at several contexts (none: any)."""
    return does(*TRAININGS, task=tasks)


def measures(*names: str) -> Condition:
    """Whether the command is one of these benchmarks."""
    return lambda settings: settings.benchmark.name in names


def either(*conditions: Condition) -> Condition:
    return lambda settings: any(one(settings) for one in conditions)


def unless(exempt: Condition, condition: Condition) -> Condition:
    """The condition, except where `exempt` holds, which another rule is for."""
    return lambda settings: exempt(settings) or condition(settings)


def never(settings: Settings) -> bool:
    return False


def runs_the_command(settings: Settings) -> bool:
    """Whether recipe=gpt2-speed ends with a whole run of recipe=gpt2, which is told what this command was told."""
    return settings.benchmark.name == "step" and settings.benchmark.command_steps > 0


def in_stages(settings: Settings, name: str, otherwise: object) -> list[object]:
    """The values of a setting in all stages of a curriculum; the run's own where there is no stage, or it says none."""
    stages = settings.curriculum.stages if settings.task == CLASSES else []
    own = [getattr(stage, name) for stage in stages] or [None]
    return [otherwise if value is None else value for value in own]
