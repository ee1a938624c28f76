"""The interface between a run and its Mode, the kind of work that no task does, such as a
benchmark.

Modes are classes registered under their names, as tasks are (spec.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flashtrain.errors import UserError
from flashtrain.registry import component, registered
from flashtrain.settings.settings import OF_A_CHECKPOINT, Settings
from flashtrain.spec import imported, task_of

if TYPE_CHECKING:
    from flashtrain.settings.command_line import CommandLine
    from flashtrain.training.hardware import Hardware


class Mode:
    """An activity of a run other than training, such as mode=benchmark."""

    measures = False  # whether it chooses attention and dtypes itself, not by the machine
    # Whether it runs other commands: it takes the command line's words, and no folder.
    study = False
    of_checkpoint = False  # whether it works on a checkpoint, with the run's own settings
    of_weights = False  # whether it also works on weights without a run: weights= or model.path=
    of_recipe = False  # whether it also works on a recipe's model with random weights
    own: tuple[str, ...] = ()  # the groups of settings that only this mode has
    shared: tuple[str, ...] = ()  # groups of other modes that this mode uses too
    # The setting that, where it has a value, makes mode=plan plan this mode and not a training.
    requested_by = ""
    example = ("", "")  # for --help: words after `python -m flashtrain`, and what they do

    def uses(self, settings: Settings) -> Sequence[str] | None:
        """Return the names of the settings and groups that this mode uses; None: those that
        training uses, as a study does."""
        return None if self.study else self.own

    def contexts(self, settings: Settings) -> Sequence[int]:
        """Return the context lengths that this mode compares; empty if it uses
        settings.context only."""
        return ()

    def is_requested(self, settings: Settings) -> bool:
        """Return whether mode=plan with these settings plans this mode, and not a training."""
        group, _, name = self.requested_by.partition(".")
        return bool(name) and bool(getattr(getattr(settings, group, None), name, None))

    def check(self, settings: Settings) -> None:
        """Raise UserError for settings with which this mode cannot run."""

    # A mode has run, run_study or run_checkpoint; plan and demo_line where a recipe is of it.
    if TYPE_CHECKING:

        def plan(self, settings: Settings, hardware: Hardware) -> str:
            """Return the text of mode=plan: what would be done. Nothing is started."""

        def run(
            self,
            settings: Settings,
            hardware: Hardware,
            folder: Path,
            *,
            overrides: Sequence[str],
            started: float,
        ) -> dict[str, Any]:
            """Run the mode in `folder`, and return the summary row."""

        def run_study(self, settings: Settings, overrides: CommandLine, *, started: float) -> int:
            """Run this mode as a study, which starts a command for each of its trainings, and
            return the exit status."""

        def run_checkpoint(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
            """Run this mode on settings.checkpoint, print the results and return them by name."""

        def demo_line(self, demo: Settings, where: str) -> str:
            """Return a line on what the demo does; it ends with the text `where`, which says how to
            run the recipe in full."""


class Check(Mode):
    """mode=check: whether a model's documents see each other, and what it declares is felt."""

    of_checkpoint = of_weights = of_recipe = True
    example = (
        "mode=check recipe=hf model.config=llama-1b",
        "do documents of a row see each other? are windows felt?",
    )

    def uses(self, settings: Settings) -> tuple[str, ...]:
        return ("checkpoint", "weights", "attention", "context", "data", "mask", "model")

    def check(self, settings: Settings) -> None:
        if settings.task != "language_model":
            raise UserError(
                f"mode=check with recipe={settings.recipe}, task={settings.task}: expected a "
                "language model. Other models: flashtrain.check(model, batch)."
            )

    run_checkpoint = imported("flashtrain.checks.command:run_check")


def mode_of(settings: Settings) -> Mode | None:
    """Return the Mode that settings.mode names; None for train, plan, evaluate, generate and
    export, which the task runs."""
    if settings.mode in registered("mode"):
        return cast(Mode, component("mode", settings.mode)())
    return None


def is_of_checkpoint(mode: str) -> bool:
    """Return whether this mode works on a checkpoint, with the settings of the run that saved
    it."""
    others = modes()
    return mode in OF_A_CHECKPOINT or (mode in others and others[mode].of_checkpoint)


def work_of(settings: Settings) -> str:
    """Return the name of what is run: settings.mode or, for mode=plan, the planned
    "train" or registered mode."""
    if settings.mode != "plan":
        return settings.mode
    return next((name for name, mode in modes().items() if mode.is_requested(settings)), "train")


def working_mode(settings: Settings) -> Mode | None:
    """Return the registered Mode that settings.mode names or mode=plan plans; None for
    "train" and a task's modes."""
    return modes().get(work_of(settings))


def modes() -> dict[str, Mode]:
    """Return the registered modes by name."""
    return {name: cast(Mode, component("mode", name)()) for name in registered("mode")}


def contexts_words(settings: Settings) -> str:
    """Return the context as text, such as "context 1024"; for a study the range of
    contexts that it compares."""
    mode = mode_of(settings)
    compared = () if mode is None else mode.contexts(settings)
    if compared:
        return f"contexts {min(compared)} to {max(compared)}"
    return f"context {settings.context}"


def check_settings(settings: Settings) -> None:
    """Raise UserError for the first setting that cannot work: by itself, with another
    setting, or with the mode."""
    settings.check()
    task_of(settings).check(settings)
    if mode := mode_of(settings):
        mode.check(settings)
