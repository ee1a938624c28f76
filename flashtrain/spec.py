"""The interface between a run and its Task, the kind of training; for other work
than training see mode.py.

Tasks are classes registered under their names (flashtrain/registry.py). Nothing else
branches on these names. Their methods import torch when they are called, so that settings
are checked before it is loaded.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flashtrain.errors import UserError, one_of
from flashtrain.registry import component, registered
from flashtrain.settings.settings import OF_A_CHECKPOINT, Settings

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from flashtrain.data.tokenizers import Tokenizer
    from flashtrain.settings.command_line import CommandLine
    from flashtrain.training.hardware import Hardware
    from flashtrain.training.memory_choice import Batching
    from flashtrain.training.throughput import Throughput

Names = tuple[str, ...]  # of settings and of their groups


@dataclass
class StageContext:
    """The settings and files of one of several trainings in a run, such as one stage of a
    curriculum."""

    settings: Settings  # of this training, in place of the run's
    resumed: Path | None  # the checkpoint to resume from; None: as settings.resume says
    logs: Path  # the folder of the loggers
    # Whether another training follows: a signal that comes in the last step still stops the run.
    goes_on: bool = False
    # Called once this one has ended, before the checkpoint is written again from which the next
    # one starts; None: it starts from the last one.
    before_saving: Callable[[], None] | None = None


@dataclass
class TrainedModel:
    """A trained model, read back from a checkpoint. It can be passed wherever the
    checkpoint's path can."""

    model: Any  # a torch module in evaluation mode
    tokenizer: Any  # a Tokenizer; None for data that are no text
    settings: Settings  # of its run, with those that were given on top
    folder: Path  # of its run, or of its weights
    checkpoint: Path  # the file
    step: int  # optimizer steps that it was trained for; 0 where unknown
    labels: Sequence[str] = ()  # names of the labels that it predicts; none for other models

    def __fspath__(self) -> str:
        return str(self.checkpoint)


@dataclass
class TrainingSetup:
    """The parts of one training that a task builds from the settings: LightningModule, data,
    batching, lines to print."""

    data: pl.LightningDataModule
    task: pl.LightningModule
    throughput: Throughput
    batching: Batching
    description: dict[str, Any]  # of the model, in plain values, for its checkpoints
    # Lines to print about the data and the training. They are read once the run has its folder,
    # since reading them may prepare data for long.
    lines: Iterable[str]
    # Called after the fit, on every rank: returns the columns of the summary row that the training
    # found, and prints whatever else there is to report.
    row: Callable[[pl.Trainer], dict[str, Any]]
    tokenizer: Tokenizer | None = None  # saved in the run's folder
    advice: str | None = None  # what else needs less memory; None: what holds for language models
    monitor: str = "validation_loss"  # the metric of the best checkpoint
    mode: str = "min"  # whether its "min" or "max" is best
    callbacks: Sequence[pl.Callback] = ()  # in addition to those of every run
    stage: StageContext | None = None  # of one of several trainings


def imported(where: str) -> Any:
    """Return a method that calls the function at `where` ("package.module:name"); the module is
    imported when the method is first called."""
    module, _, name = where.partition(":")
    return lambda self, *arguments, **named: getattr(importlib.import_module(module), name)(
        *arguments, **named
    )


class Plan(str):
    """The text of mode=plan, and the estimated seconds of its trainings (0: unknown)."""

    seconds: float

    def __new__(cls, text: str, seconds: float) -> Plan:
        plan = super().__new__(cls, text)
        plan.seconds = seconds
        return plan


class Task(ABC):
    """A kind of training, such as task=language_model. Methods raise UserError for
    mistakes in the settings."""

    settings: type[Settings] = Settings  # its schema: every run's settings and its own
    has_epochs = True  # whether trainer.epochs gives the steps of its trainings
    plans_epochs = False  # whether its plan reads the data to count them
    shards = True  # whether its models' weights may be sharded among devices
    # Of evaluate, generate and export those modes that it has, each with the settings and groups of
    # its own that the mode uses.
    modes: Mapping[str, Names] = {}
    # settings of its own that weights and checkpoints have as they were trained ...
    shape: Names = ()
    trained: Names = ()  # ... and those that checkpoints alone have so
    same: Names = ()  # settings and groups of its own: what is another training if it differs
    # The figures that its trainings log, for early stopping; (): not known before a validation. A
    # class that derives from this one may log others, and has none unless it names them.
    logged: Names = ()

    def check(self, settings: Settings) -> None:
        """Raise UserError for settings that this task does not support, whatever the machine."""
        if settings.mode in OF_A_CHECKPOINT and settings.mode not in self.modes:
            has = ", ".join(("train", "plan", *self.modes))
            raise UserError(
                f"mode={settings.mode} is not a mode of recipe={settings.recipe} "
                f"(task={settings.task}). Expected one of: {has}."
            )
        planned = settings.mode == "plan" and not self.plans_epochs
        if settings.trainer.epochs is not None and (planned or not self.has_epochs):
            what = f"{'mode=plan of ' if planned else ''}task={settings.task}"
            raise UserError(f"trainer.epochs is not supported by {what}. Set trainer.steps.")
        monitor, logged = settings.trainer.early_stopping_monitor, vars(type(self)).get("logged")
        trains = settings.mode in ("train", "plan") and not settings.trainer.callbacks
        if monitor is not None and logged and trains:
            one_of("trainer.early_stopping_monitor", monitor, logged)
        if settings.strategy == "fsdp" and not self.shards:
            raise UserError(
                f"trainer.strategy=fsdp does not support recipe={settings.recipe} "
                f"(task={settings.task}). Use trainer.strategy=ddp."
            )
        if settings.shares_sequences and not hasattr(settings, "context_parallel"):
            raise UserError(
                f"trainer.strategy={settings.strategy} trains language models, and "
                f"recipe={settings.recipe} is task={settings.task}. Use trainer.strategy=ddp."
            )

    def suit_demo(self, demo: Settings, given: Collection[str]) -> None:  # noqa: B027 - few tasks have one
        """Change the demo's settings in place to suit those that the command
        line names (`given`)."""

    def suit_weights(self, settings: Settings, given: Collection[str]) -> Sequence[str]:
        """Change the settings in place to suit the `weights` to start from,
        except for those in `given`.

        Args:
            given: the names of the settings on the command line.

        Returns:
            Lines to print about the changes.

        Raises:
            UserError: `given` contradicts the weights.
        """
        return ()

    def check_step(self, settings: Settings, given: Collection[str]) -> None:  # noqa: B027 - as suit_demo
        """Raise UserError for settings that cannot be trained on this machine; `given` are the
        names of the settings on the command line."""

    @abstractmethod
    def columns(self, settings: Settings) -> dict[str, Any]:
        """Return the columns of the summary row that are known before the training, such as
        "model" and "context"."""

    def prepare(self, settings: Settings, hardware: Hardware) -> TrainingSetup:
        """Build data module, model and LightningModule of one training. The random
        generators are seeded before.

        Raises:
            UserError: a mistake that the user can correct.
        """
        raise NotImplementedError  # in a task that overrides `trainings`

    def trainings(
        self, settings: Settings, hardware: Hardware, folder: Path, overrides: Sequence[str]
    ) -> Iterator[TrainingSetup]:
        """Yield the setup of a run's one training, or of every stage of a curriculum after the
        stage before has ended.

        Args:
            folder: the run's folder.
            overrides: the command line's words.
        """
        yield self.prepare(settings, hardware)

    @abstractmethod
    def plan(self, settings: Settings, hardware: Hardware) -> str:
        """Return the text of mode=plan: what would be trained; a Plan where it has an estimate of
        the time. Nothing is started."""

    @abstractmethod
    def report(self, row: dict[str, Any], folder: Path, settings: Settings) -> None:
        """Print the results in the summary `row` of a finished training, its folder, and a command
        to try next."""

    def run_mode(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        """Run a mode of this task's checkpoints, such as mode=evaluate, and print the results.

        Returns:
            The results by name: the metrics of evaluate, "text" of generate, "folder" of export.
        """
        raise NotImplementedError  # in a task without such modes

    def load(self, settings: Settings, hardware: Hardware) -> TrainedModel:
        """Load the model of settings.checkpoint onto the machine's device, in evaluation mode."""
        raise UserError(
            f"flashtrain.load does not support task={settings.task}. "
            "Use mode=evaluate checkpoint=FOLDER."
        )

    @abstractmethod
    def demo_line(self, full: Settings, demo: Settings, where: str) -> str:
        """Return the text after "training" or "planning" in the line about a demo: what the demo
        is, then the text `where`, which says how to train the recipe in full."""

    def of_checkpoint(self, settings: Settings, checkpoint: Path) -> Settings:
        """Return the saved `settings` of a run, with other values where modes that use its
        `checkpoint` need them: those of its stage."""
        return settings

    def for_weights(self, line: CommandLine) -> Settings | None:
        """Return settings for mode=evaluate weights=FILE without a run; None if this task
        evaluates no such weights."""
        return None

    def is_carried(self, resume: str) -> bool:
        """Return whether `resume` names a checkpoint that lies in no run folder; a run in a new
        folder then continues it."""
        return False


def task_of(settings: Settings) -> Task:
    """Return the Task that the settings name."""
    return cast(Task, component("task", settings.task)())


def tasks() -> dict[str, Task]:
    """Return the registered tasks by name."""
    return {name: cast(Task, component("task", name)()) for name in registered("task")}


def measured_words(row: dict[str, Any]) -> str:
    """Return MFU and peak memory of a summary row as text; "" if they were not measured."""
    mfu, peak = row.get("mfu"), row.get("peak_memory_gib")
    words = "" if mfu is None else f", MFU {mfu:.1%}"
    return words + ("" if peak is None else f", peak memory {peak:.2f} GiB")


def losses_words(row: dict[str, Any]) -> str:
    """Return the losses of a summary row as text, after a headline's beginning."""
    first, last, held_out = row["train_loss_first"], row["train_loss"], row["validation_loss"]
    words = ""
    if last is not None:  # a run that was ended after its last step, and resumed, trains no more
        words = f": training loss {last:.3f} at the last step"
        words += "" if first is None else f" ({first:.3f} at the first)"
    return words + ("" if held_out is None else f", validation loss {held_out:.3f}")


def report_finished(
    folder: Path,
    headline: str,
    *lines: str,
    files: str = "config.yaml, summary.json, metrics.jsonl, report.html",
    then: str | None = None,
) -> None:
    """Print the results of a run, its folder, and a command to try next.

    Args:
        folder: the run's folder.
        headline: the results in one line.
        lines: further lines on the results.
        files: the names of the files in the folder, as printed.
        then: the command's words to try next; None: mode=evaluate of this run.
    """
    from flashtrain.announce import say
    from flashtrain.settings.command_line import program

    then = then or f"mode=evaluate checkpoint={folder}"
    where = f"run folder {folder} ({files}), checkpoints in {folder / 'checkpoints'}"
    for line in (
        "",
        headline,
        *(f"  {one}" for one in (*lines, where, f"try next: {program} {then}")),
    ):
        say(line)
