"""Who trains, plans and reports each task (the setting `task`): the one place to add another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flashtrain.run.plan import plan
from flashtrain.run.run import train
from flashtrain.run.sample import default_prompt
from flashtrain.run.summary import say_summary
from flashtrain.settings.settings import Settings
from flashtrain.tasks.fine_tuning.plan import plan_fine_tuning
from flashtrain.tasks.fine_tuning.rows import say_fine_tuned
from flashtrain.tasks.fine_tuning.run import train_fine_tuning
from flashtrain.tasks.masked_language.plan import plan_masked
from flashtrain.tasks.masked_language.rows import say_masked
from flashtrain.tasks.masked_language.run import train_masked
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.arena.plan import plan_classifier
from flashtrain_recipes.arena.rows import say_classified
from flashtrain_recipes.arena.run import train_classifier


class _Train(Protocol):
    def __call__(
        self, settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
    ) -> dict[str, Any]: ...


class TaskRun(NamedTuple):
    """train: one run in a folder, returning its summary row. plan: what it would do, as text. say: the row, printed."""

    train: _Train
    plan: Callable[[Settings, Hardware], str]
    say: Callable[[dict[str, Any], Path, Settings], None]


def _say_trained(row: dict[str, Any], folder: Path, settings: Settings) -> None:
    say_summary(row, folder, settings.prompt or default_prompt(settings.data.source))


_RUNS = {
    "language_model": TaskRun(train, plan, _say_trained),
    "classification": TaskRun(train_classifier, plan_classifier, say_classified),
    "masked_language_model": TaskRun(train_masked, plan_masked, say_masked),
    "fine_tuning": TaskRun(train_fine_tuning, plan_fine_tuning, say_fine_tuned),
}


def task_run(settings: Settings) -> TaskRun:
    """The functions of the task that the settings name."""
    return _RUNS[settings.task]
