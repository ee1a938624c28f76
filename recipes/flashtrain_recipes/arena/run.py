"""One run that trains a classifier, in one stage or in several: the folder, the checkpoints, the summary row.

runs/pathx/2026-11-21_10-15-02/
  config.yaml, summary.json, checkpoints/   as every run; last.ckpt says which stage it is of
  learning_curve.csv                        a row at each validation, through all stages and pieces
  learning_curve.png                        at the end, of Pathfinder only: the same drawn
  result.json                               the same at the end, in the form of recipes/results
  stage-1-side-32/metrics.csv, ...          every logged number, a folder a stage (a single stage's lie in the run's)
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.announce import is_first_rank, say
from flashtrain.folders.run_folder import (
    BEST,
    CHECKPOINTS,
    FINISHED,
    LAST,
    RUNNING,
    find_checkpoint,
    read_summary,
    write_config,
    write_summary,
)
from flashtrain.models.classifier import carry_weights
from flashtrain.report.rows import RESULT, write_result
from flashtrain.run.fitting import fit
from flashtrain.run.summary import planned_row
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, compiles
from flashtrain.tasks.encoder_batching import memory_columns
from flashtrain.tasks.training_task import metric
from flashtrain.training.callbacks import describe_validation
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput
from flashtrain_recipes.arena.batching import choose_stage_batching
from flashtrain_recipes.arena.best_of_stage import BestOfStage
from flashtrain_recipes.arena.build import (
    describe_stage,
    make_classifier,
    make_data,
    make_sequence_source,
    make_task,
    pixels_read,
    trained_config,
)
from flashtrain_recipes.arena.curve import LearningCurve
from flashtrain_recipes.arena.fallen import end_if_fallen, forget_start, keep_start
from flashtrain_recipes.arena.figures import curriculum_figure
from flashtrain_recipes.arena.resume import Resumed, check_same, find_resumed
from flashtrain_recipes.arena.stages import Stage, stages_of
from flashtrain_recipes.arena.weights import SUFFIX, SavedClassifier, read_classifier
from flashtrain_recipes.arena.words import describe_stage_line, random_start

CURVE = "learning_curve.csv"
_ADVICE = "a smaller trainer.micro_batch=, memory=full, or trainer.devices on more GPUs"


@dataclass
class _Fitted:
    """A stage that went to its end."""

    saved: SavedClassifier
    throughput: Throughput
    batching: Batching
    length: int
    validation: dict[str, float | None]


def train_classifier(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Train all stages as the settings say, in `folder`, and return the summary row.

    started: time.time() at the command's start. Raises UserError for what the user can mend, Stopped after a signal or
    at the end of trainer.max_minutes, OutOfMemory.
    """
    torch.set_float32_matmul_precision("high")
    stages = stages_of(settings)
    for stage in stages:
        source = make_sequence_source(stage.settings, fixed=compiles(stage.settings, hardware))
        trained_config(stage.settings, source.shape)  # says what does not suit before the first stage trains
    resumed = find_resumed(settings, folder, stages)
    start = _starting_weights(settings) if resumed is None else None
    curve = LearningCurve(folder / CURVE)
    if resumed is not None and resumed.curve is not None:
        curve.load_state_dict(resumed.curve)
    first = 0
    if resumed is not None:
        first = resumed.stage
        over = curve.is_over(stages[first], resumed.step)
        if over and first + 1 < len(stages):
            end_if_fallen(curve.rows, stages[first], folder / CHECKPOINTS)
            first, start = first + 1, resumed.saved
        elif over or resumed.step >= stages[first].steps:
            before = read_summary(folder)
            if first + 1 == len(stages) and before.get("status") == FINISHED:  # what it measured stays
                say(f"the run in {folder} is finished: nothing is left to train.")
                return before
        say(f"resuming from {resumed.checkpoint} ({stages[resumed.stage].name}, step {resumed.step})")

    write_config(settings, folder)
    write_summary(folder, {**planned_row(settings, hardware, overrides), "status": RUNNING})
    if curve.rows:
        curve.write()
    fitted: _Fitted | None = None
    for stage in stages[first:]:
        again = resumed if resumed is not None and stage.number == resumed.stage else None
        curve.begin_stage(stage)
        if is_first_rank():
            keep_start(stage, start, folder / CHECKPOINTS)
        fitted = _fit(stage, hardware, folder, curve, start=start, resumed=again, started=started)
        end_if_fallen(curve.rows, stage, folder / CHECKPOINTS)
        if is_first_rank():
            forget_start(stage, folder / CHECKPOINTS)
        start = fitted.saved
    if fitted is None:
        raise AssertionError("a training has a stage at least")
    if curve.rows and is_first_rank():
        _publish(settings, folder, curve, overrides)
    return _row(settings, hardware, fitted, curve, overrides=overrides, started=started)


def _fit(
    stage: Stage,
    hardware: Hardware,
    folder: Path,
    curve: LearningCurve,
    *,
    start: SavedClassifier | None,
    resumed: Resumed | None,
    started: float,
) -> _Fitted:
    """Train one stage. start: the weights to start from, None for random ones. resumed: where to go on in it."""
    # Another seed for each stage: short stages of the same images would read the same first few of them, over and over.
    # Set anew here, so that a stage that is begun by a later command is begun alike.
    settings = replace(stage.settings, seed=stage.settings.seed + stage.number)
    pl.seed_everything(settings.seed, verbose=False)
    source = make_sequence_source(settings, fixed=compiles(settings, hardware))
    source.prepare()
    say(source.describe())
    model = make_classifier(settings, hardware, source.shape)
    if start is not None:
        carry_weights(model, start.config, start.state)
    if resumed is not None:
        check_same(resumed, model.config)
    batching = choose_stage_batching(stage, hardware, model)
    model.save_memory(batching.savings)
    say(describe_stage_line(stage, hardware, model, batching))
    data = make_data(settings, hardware, source, micro_batch=batching.micro_batch, accumulate=batching.accumulate)
    asked, every = settings.sequence.validation_samples, settings.trainer.validate_every
    say(describe_validation(data.held_out_samples, asked, every, "sequence.validation_samples"))
    task = make_task(settings, hardware, model, describe_stage(stage, model))
    read = pixels_read(settings, source.shape.length)
    length = read * source.shape.towers
    throughput = Throughput(
        model.flops_per_sample(read) / length, tokens_per_step=stage.batch * length, peak_flops=hardware.peak_flops
    )
    by_accuracy = settings.sequence.classification_weight > 0
    monitor, mode = ("validation_accuracy", "max") if by_accuracy else ("validation_loss", "min")
    goes_on = stage.number + 1 < stage.count
    best = BestOfStage(model, monitor, mode)

    def finish(trainer: pl.Trainer) -> dict[str, Any]:
        found = {name: metric(trainer, f"validation_{name}") for name in ("accuracy", "loss")}
        if not any(found.values()) and curve.rows:  # nothing was left to do
            found = {name: float(curve.rows[-1][f"validation_{name}"]) for name in found}
        return {f"validation_{name}": value for name, value in found.items()}

    def settle() -> None:
        if best.restore():
            say(f"{stage.name}: the next stage starts from its best weights, of step {best.step:,}")

    validation = fit(
        _logged(stage, folder),
        hardware,
        folder,
        task,
        data,
        throughput,
        resumed=resumed.checkpoint if resumed else None,
        started=started,
        finish=finish,
        batching=batching,
        advice=_ADVICE,
        logs=folder / stage.folder,
        goes_on=goes_on,  # with the curve's last row
        settle=settle,
        monitor=monitor,
        mode=mode,
        callbacks=[curve, best] if goes_on else [curve],
    )
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    saved = SavedClassifier(model.config, state, describe_stage(stage, model), folder / CHECKPOINTS / LAST)
    return _Fitted(saved, throughput, batching, length, validation)


def _publish(settings: Settings, folder: Path, curve: LearningCurve, overrides: list[str]) -> None:
    """The learning curve as a result file and, of Pathfinder's stages, as a picture."""
    told = [word for word in overrides if not word.lstrip("+~").startswith(("output", "logger", "hydra", "resume"))]
    command = " ".join(["python -m flashtrain", *map(shlex.quote, told)])
    rows = [{"implementation": "flashtrain", **row} for row in curve.rows]
    write_result(folder / RESULT, settings.recipe, command, rows)
    if settings.sequence.data == "pathfinder" and rows:
        curriculum_figure(rows, (folder / CURVE).with_suffix(".png"))


def _logged(stage: Stage, folder: Path) -> Settings:
    """The stage's settings with the names that loggers show: a curriculum's stages are one group."""
    settings, logger = stage.settings, stage.settings.logger
    if not stage.folder:
        return settings
    name = f"{logger.run_name or f'{settings.recipe}-{folder.name}'}-{stage.folder}"
    return replace(
        settings,
        logger=replace(logger, run_name=name, group=logger.group or f"{settings.recipe}-{folder.name}"),
    )


def _starting_weights(settings: Settings) -> SavedClassifier | None:
    """The classifier that `weights` names: a .safetensors file, a checkpoint, or a run folder (its best weights)."""
    if settings.weights is None:
        hint = random_start(stages_of(settings)[0])
        if hint:
            say(hint)
        return None
    path = Path(settings.weights).expanduser()
    if path.suffix != SUFFIX and path.is_dir():
        _, path = find_checkpoint(settings.weights, prefer=BEST)
    saved = read_classifier(path)
    say(f"starting from the weights in {path}")
    return saved


def _row(
    settings: Settings,
    hardware: Hardware,
    fitted: _Fitted,
    curve: LearningCurve,
    *,
    overrides: list[str],
    started: float,
) -> dict[str, Any]:
    measured = fitted.throughput.summary()
    rate = measured["tokens_per_second"]
    return {
        **planned_row(settings, hardware, overrides),
        "status": FINISHED,
        **curve.made(),  # fewer than planned, where stages ended early
        "context": fitted.saved.config.length,
        "parameters": sum(value.numel() for value in fitted.saved.state.values()),
        "micro_batch": fitted.batching.micro_batch,
        **memory_columns(fitted.batching),
        **fitted.validation,
        "samples_per_second": None if rate is None else round(rate / fitted.length, 2),
        "tokens_per_second": rate,
        "step_seconds": measured["step_seconds_median"],
        "mfu": measured["mfu"],
        "peak_memory_gib": measured["peak_memory_gib"],
        "minutes": round(curve.minutes, 2),
        "seconds": round(time.time() - started, 1),
    }
