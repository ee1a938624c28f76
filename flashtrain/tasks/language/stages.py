"""A language model's training in stages, such as those of longer and longer contexts.

runs/hf/2026-11-28_18-00-00/
  config.yaml, summary.json, checkpoints/  as every run; a checkpoint stores its stage
  stage-1-context-32768/metrics.jsonl      a stage's logged numbers
  stage-1-context-32768/summary.json       what it cost and its losses, once it has ended
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from flashtrain.errors import UserError, one_of
from flashtrain.folders import run_folder
from flashtrain.folders.run_folder import FINISHED, read_summary
from flashtrain.models.decoder_config import FAMILIES
from flashtrain.settings.settings import Settings
from flashtrain.spec import StageContext, Task, TrainingSetup, measured_words
from flashtrain.tasks.decoders import check_layers
from flashtrain.tasks.language.exports import take_export
from flashtrain.tasks.stages import TrainingStage, changed, check_used_by_stages
from flashtrain.training.checkpoints import LAST, check_resumable, read_checkpoint, weights_in
from flashtrain.training.hardware import Hardware

# {a stage's setting: the run's setting that it replaces}.
OF_STAGES = {
    "context": "context",
    "steps": "trainer.steps",
    "tokens_per_step": "trainer.tokens_per_step",
    "micro_batch": "trainer.micro_batch",
    "learning_rate": "optimizer.learning_rate",
    "schedule": "schedule.name",
    "warmup_steps": "schedule.warmup_steps",
    "rope": "model.rope",
    "rope_factor": "model.rope_factor",
    "rope_base": "model.rope_base",
    "interpolate_positions": "model.interpolate_positions",
    "length_weights": "data.length_weights",
}
SUMMED = ("steps", "tokens", "epochs")  # columns of the run's row that are sums over its stages


def stages_of(settings: Settings) -> list[TrainingStage]:
    """Return the stages to train: a single one without entries in `stages`.

    What an entry leaves out is as in the run's settings, of the model as in the stage before. All
    stages hold out the same documents.
    """
    if not settings.stages:
        return [TrainingStage(0, 1, settings, f"context-{settings.context}")]
    made: list[Settings] = []
    for number, entry in enumerate(settings.stages):
        before = made[-1].model if made else settings.model
        for key in entry:
            one_of(f"setting in stages[{number}]", key, OF_STAGES)
        changes = {OF_STAGES[key]: value for key, value in entry.items()}
        made.append(changed(settings.having(stages=[], model=before), changes))
    longest = max(settings.data.split_context or 0, *(one.context for one in made))
    return [
        TrainingStage(number, len(made), one.having(data=data), f"context-{one.context}")
        for number, one in enumerate(made)
        for data in [replace(one.data, split_context=longest)]
    ]


def check_stages(task: Task, settings: Settings, given: Collection[str]) -> None:
    """Raise UserError for a stage that cannot be trained, as far as its settings show."""
    check_used_by_stages("stages", OF_STAGES, settings.stages, given)
    if settings.trainer.epochs is not None:
        raise UserError(f"trainer.epochs={settings.trainer.epochs:g} with stages: set their steps.")
    reach = 0  # tokens that learned positions are known for
    for stage in stages_of(settings):
        own = stage.settings
        try:
            own.check()
            task.check_step(own, ())
            shape = None if own.weights else check_layers(own.model, own.mask, own.context)
            if shape is None or shape.positions != "learned" or own.model.interpolate_positions:
                continue
            if reach and own.context > reach:
                raise UserError(
                    f"context={own.context} is longer than the {reach} learned positions of the "
                    "stage before. Add interpolate_positions: true."
                )
            reach = max(reach, own.context)
        except UserError as error:
            raise UserError(f"stages[{stage.number}]: {error}") from error


def of_stage(settings: Settings, checkpoint: Path) -> Settings:
    """Return a run's settings as they were in the stage of its `checkpoint`."""
    if not settings.stages:
        return settings
    return stages_of(settings)[_stage_in(read_checkpoint(checkpoint, mmap=True))].settings


def _stage_in(saved: Mapping[str, Any]) -> int:
    return int(saved["flashtrain"].get("stage", 0))


def trainings(
    task: Task, settings: Settings, hardware: Hardware, folder: Path
) -> Iterator[TrainingSetup]:
    """Yield the setup of every stage that is left to train; see Task.trainings."""
    take_export(settings)
    stages = stages_of(settings)
    for stage in stages[1:]:
        task.plan(stage.settings, hardware)  # what cannot work is said before the first one trains
    resumed, first, over = run_folder.last_checkpoint(settings, folder), 0, False
    if resumed is not None:
        saved = read_checkpoint(resumed, mmap=True)
        first, step = _stage_in(saved), check_resumable(saved, resumed)
        one_of(f"stage of {resumed}", first, range(len(stages)))
        # A stage that was ended in its last validation goes on there.
        ended = read_summary(folder / stages[first].folder).get("status") == FINISHED
        over = ended and step >= stages[first].steps and first + 1 < len(stages)
    start = resumed
    for stage in stages[first + over :]:
        resumes = stage.number == first and resumed is not None
        prepared = _prepared(task, stages, stage, hardware, folder, start, resumes)
        yield prepared
        prepared.task.cpu()  # the next one needs its memory
        start = folder / run_folder.CHECKPOINTS / LAST


def _prepared(
    task: Task,
    stages: Sequence[TrainingStage],
    stage: TrainingStage,
    hardware: Hardware,
    folder: Path,
    start: Path | None,
    resumes: bool,
) -> TrainingSetup:
    """Return a stage's setup. `start`: the checkpoint whose weights the model starts from, which
    is of this stage if it `resumes`; None: the run's own weights."""
    settings, ours = stage.begin(), stage.settings.model.name in FAMILIES
    if ours and start is not None:
        settings = settings.having(weights=str(start))
    prepared = task.prepare(settings, hardware)
    if start is not None and not (ours or resumes):
        prepared.task.model.fill(weights_in(read_checkpoint(start), start))
    for one in (prepared.description, prepared.task.description):
        one["stage"] = stage.number
    anew = "" if start is None or resumes else ": optimizer and schedule begin anew"
    prepared.lines = [f"{stage.name}{anew}", *prepared.lines]
    resume = settings.resume if resumes else None
    logged = stage.logged(folder).having(seed=settings.seed, resume=resume)
    prepared.stage = StageContext(logged, None, folder / stage.folder, None, start)
    found = prepared.row

    def row(trainer: pl.Trainer) -> dict[str, Any]:
        # Those of the run so far; those of the stage alone are written to its folder.
        own = found(trainer)
        before = [read_summary(folder / one.folder) for one in stages[: stage.number]]
        if stage.folder and trainer.is_global_zero:
            seconds = round(own["steps"] * (own["step_seconds"] or 0), 1)
            about = {"recipe": settings.recipe, "status": FINISHED, "stage": stage.number + 1}
            columns = task.columns(stage.settings) | own | {"train_seconds": seconds}
            run_folder.write_summary(folder / stage.folder, about | columns)
        sums = {name: sum(one.get(name) or 0 for one in (*before, own)) for name in SUMMED}
        return {**own, **sums, "train_loss_first": (*before, own)[0]["train_loss_first"]}

    prepared.row = row
    return prepared


def stage_lines(settings: Settings, folder: Path) -> Iterator[str]:
    """Yield a line on what each stage of a finished run cost; none without stages."""
    for stage in stages_of(settings) if settings.stages else ():
        row = read_summary(folder / stage.folder)
        line = f"{stage.name}: {row['steps']:,} steps, {row['tokens']:,} tokens"
        if rate := row["tokens_per_second"]:
            minutes = f"{row['train_seconds'] / 60:.1f} min of steps"
            line += f", {minutes}, {rate:,.0f} tokens/s{measured_words(row)}"
        for name in ("train_loss", "validation_loss"):
            line += "" if row[name] is None else f", {name.replace('_', ' ')} {row[name]:.3f}"
        yield line
