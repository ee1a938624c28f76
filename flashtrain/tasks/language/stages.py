"""A language model's training in stages, such as those of longer and longer contexts.

runs/hf/2026-11-28_18-00-00/
  checkpoints/                         as every run's; a checkpoint stores its stage
  stage-1-context-32768/metrics.jsonl  a stage's logged numbers
  stage-1-context-32768/summary.json   what it cost and its losses, once it has ended
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from pytorch_lightning.callbacks import LambdaCallback

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders import run_folder
from flashtrain.folders.run_folder import CHECKPOINTS, FINISHED, read_summary
from flashtrain.models.decoder_config import FAMILIES
from flashtrain.settings.settings import Settings
from flashtrain.spec import StageContext, TrainingSetup, measured_words, task_of
from flashtrain.tasks.decoders import check_layers
from flashtrain.tasks.language.exports import take_export
from flashtrain.tasks.language.starting_weights import starting_weights
from flashtrain.tasks.stages import TrainingStage, changed_by, check_used_by_stages
from flashtrain.training.checkpoints import LAST, check_resumable, read_checkpoint, weights_in
from flashtrain.training.hardware import Hardware


def stages_of(settings: Settings) -> list[TrainingStage]:
    """Return the stages to train: a single one without entries in `stages`.

    What an entry leaves out is as in the run's settings, of the model as in the stage before. All
    stages hold out the same documents.
    """
    made: list[Settings] = []
    for number, entry in enumerate(settings.stages):
        own = settings.having(stages=[], model=made[-1].model if made else settings.model)
        made.append(changed_by(own, entry, f"stages[{number}]"))
    longest = max([settings.data.split_context or 0, *(one.context for one in made)])
    made = [one.having(data=replace(one.data, split_context=longest)) for one in made] or [settings]
    return [
        TrainingStage(number, len(made), one, f"context-{one.context}")
        for number, one in enumerate(made)
    ]


def check_stages(settings: Settings, given: Collection[str]) -> None:
    """Raise UserError for a stage that cannot be trained, as far as its settings show."""
    check_used_by_stages("stages", settings.stages, given)
    if settings.trainer.epochs is not None:
        raise UserError(f"trainer.epochs={settings.trainer.epochs:g} with stages: set their steps.")
    reach, rope = 0, None  # learned positions and rotary scaling that the stage before has
    for stage in stages_of(settings):
        own = stage.settings
        try:
            task_of(own).check_step(own, ())
            shape = None if own.weights else check_layers(own.model, own.mask, own.context)
            if rope is None and (shape is not None or own.weights is not None):
                rope = (shape or starting_weights(str(own.weights), own.model)[0]).rope
            if rope is not None:
                rope = rope.scaled(own.model.rope, own.model.rope_factor, own.context)
            learned = shape is not None and shape.positions == "learned"
            if learned and own.context > reach > 0 and not own.model.interpolate_positions:
                raise UserError(
                    f"context={own.context} is longer than the {reach} learned positions of the "
                    "stage before. Add interpolate_positions: true."
                )
        except UserError as error:
            raise UserError(f"stages[{stage.number}]: {error}") from error
        reach = max(reach, own.context)


def of_stage(settings: Settings, checkpoint: Path) -> Settings:
    """Return a run's settings as they were in the stage of its `checkpoint`."""
    if not settings.stages:
        return settings
    saved = read_checkpoint(checkpoint, mmap=True)["flashtrain"]
    return stages_of(settings)[saved.get("stage", 0)].settings


def trainings(
    settings: Settings, hardware: Hardware, folder: Path, overrides: Sequence[str]
) -> Iterator[TrainingSetup]:
    """Yield the setup of every stage that is left to train; see Task.trainings."""
    task = task_of(settings)
    if not settings.stages:
        yield task.prepare(settings, hardware)
        return
    take_export(settings)
    stages = stages_of(settings)
    for stage in stages[1:]:
        task.plan(stage.settings, hardware)  # what cannot work is said before the first one trains
    left, again = stages, None  # the stages to train, and the one that resumes
    if (start := run_folder.last_checkpoint(settings, folder)) is not None:
        saved = read_checkpoint(start, mmap=True)
        number, step = saved["flashtrain"].get("stage", 0), check_resumable(saved, start)
        if number >= len(stages):
            raise UserError(f"{start} is of stage {number + 1}: stages has {len(stages)} entries.")
        again, left = stages[number], stages[number:]
        if step >= again.steps and len(left) > 1:
            # Of a single stage it is the run's, which the first rank replaces afterwards.
            row, place = read_summary(start.parent.parent), folder / again.folder
            if row.get("status") == FINISHED and not read_summary(place):
                if (row.get("context"), step) != (again.settings.context, again.steps):
                    raise UserError(
                        f"stages[{number}] has context={again.settings.context}, "
                        f"steps={again.steps}, but the finished run has context="
                        f"{row.get('context')}, steps={step}: its own stages come first, as they "
                        "were."
                    )
                run_folder.write_summary(place, row)
            # A stage that was ended in its last validation goes on there.
            if read_summary(place).get("status") == FINISHED:
                left, again = left[1:], None
            # Its documents are held out by the longest context of all stages.
            held = max(
                settings.data.split_context or 0,
                *(one.settings.context for one in stages[: number + 1]),
            )
            longest = max(one.settings.context for one in stages)
            if (
                row.get("status") == FINISHED
                and row.get("stages", 1) <= number + 1
                and held < longest
            ):
                say(
                    f"from now on the documents of context={longest} are held out, of which the "
                    f"stages before ({held}) may have trained on some. data.split_context={longest}"
                    " in the first command avoids that."
                )
    for stage in left:
        own, ours = stage.begin(folder), stage.settings.model.name in FAMILIES
        if ours and start is not None:
            own = own.having(weights=str(start))
        prepared = task.prepare(own, hardware)
        module = cast(Any, prepared.task)
        module.model.seed = settings.seed  # the base of adapters stays the same
        if start is not None and not ours and stage is not again:
            saved = read_checkpoint(start, mmap=not start.is_dir(), checked=True)
            module.model.start_from(weights_in(saved, start))
        prepared.description["stage"] = module.description["stage"] = stage.number
        anew = "" if start is None or stage is again else ": optimizer and schedule begin anew"
        prepared.lines = [f"{stage.name}{anew}", *prepared.lines]
        own = own.having(resume=settings.resume if stage is again else None)
        goes_on = stage.number + 1 < stage.count
        prepared.stage = StageContext(own, None, folder / stage.folder, goes_on)
        prepared.row = partial(_row, stages[: stage.number + 1], folder, prepared.row)
        # The optimizers of earlier stages, which circles of references keep until then.
        frees = LambdaCallback(setup=lambda *_, **__: gc.collect())
        prepared.callbacks = [*prepared.callbacks, frees]
        yield prepared
        # The next one needs its memory. What a stage has compiled counts towards the limit of the
        # same functions' compiled forms.
        module.cpu()
        torch.compiler.reset()
        start = folder / CHECKPOINTS / LAST


def _row(done: list[TrainingStage], folder: Path, found: Any, trainer: Any) -> dict[str, Any]:
    """Write the row of the last of the stages that are `done` to its folder; return the run's."""
    own, stage = found(trainer), done[-1]
    # One that had ended early ends again at once when the run resumes: its row has what it cost.
    ended = read_summary(folder / stage.folder).get("steps") == own["steps"]
    if stage.folder and trainer.is_global_zero and not (ended and own["step_seconds"] is None):
        seconds = round(own["steps"] * (own["step_seconds"] or 0), 1)
        about = {"recipe": stage.settings.recipe, "status": FINISHED, "stage": stage.number + 1}
        columns = task_of(stage.settings).columns(stage.settings)
        row = {**about, **columns, **own, "train_seconds": seconds}
        run_folder.write_summary(folder / stage.folder, row)
    rows = [*(read_summary(folder / one.folder) for one in done[:-1]), own]
    summed = ("steps", "tokens", "epochs")
    sums = {name: round(sum(one.get(name) or 0 for one in rows), 3) for name in summed}
    first = rows[0].get("train_loss_first")
    return {**own, **sums, "stages": stage.count, "train_loss_first": first}


def stage_lines(settings: Settings, folder: Path) -> Iterator[str]:
    """Yield a line on what each stage of a finished run cost; none without stages."""
    for stage in stages_of(settings) if len(settings.stages) > 1 else ():
        row = read_summary(folder / stage.folder)
        if "train_seconds" not in row:  # of a run that went on in another folder
            continue
        loss, held_out = (row[name] or math.nan for name in ("train_loss", "validation_loss"))
        yield (
            f"{stage.name}: {row['steps']:,} steps, {row['tokens']:,} tokens in "
            f"{row['train_seconds'] / 60:.1f} min, {row['tokens_per_second'] or math.nan:,.0f} "
            f"tokens/s{measured_words(row)}, loss {loss:.3f}, held out {held_out:.3f}"
        )
