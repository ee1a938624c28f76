"""The training of a classifier in stages, each of which starts from the
weights of the stage before.

runs/pathx/2026-11-21_10-15-02/
  config.yaml, summary.json, checkpoints/  as every run; last.ckpt stores which stage it belongs to
  learning_curve.jsonl                     a row at each validation, through all stages
  learning_curve.png                       the curve as a figure, drawn at the end (Pathfinder only)
  result.json                              the curve's rows at the end, as in recipes/results
  stage-1-side-32/metrics.jsonl, ...       a stage's logged numbers; a single stage has no folder,
                                           and its metrics.jsonl lies in the run's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import is_first_rank, say
from flashtrain.folders.run_folder import (
    BEST,
    CHECKPOINTS,
    FINISHED,
    LAST,
    find_checkpoint,
    read_summary,
)
from flashtrain.models.classifier import Classifier
from flashtrain.models.weight_transfer import carry_weights
from flashtrain.report.rows import RESULT, command_line, write_result
from flashtrain.settings.settings import Settings
from flashtrain.spec import StageContext, TrainingSetup
from flashtrain.tasks.batching import compiles
from flashtrain.tasks.training_task import metric
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput
from flashtrain.training.validation import describe_validation
from flashtrain_recipes.arena.build import (
    choose_stage_batching,
    describe_stage,
    make_classifier,
    make_data,
    make_task,
    pixels_read,
    trained_config,
)
from flashtrain_recipes.arena.figures import curriculum_figure
from flashtrain_recipes.arena.learning_curve import BestOfStage, LearningCurve
from flashtrain_recipes.arena.resumed import Resumed, check_same, find_resumed
from flashtrain_recipes.arena.sources import make_sequence_source
from flashtrain_recipes.arena.stages import Stage, stages_of
from flashtrain_recipes.arena.weights import SUFFIX, SavedClassifier, read_classifier
from flashtrain_recipes.arena.words import describe_stage_line

CURVE = "learning_curve.jsonl"
_ADVICE = (
    "a smaller trainer.micro_batch=, memory.activation_checkpointing=full, "
    "or trainer.devices on more GPUs"
)


def trainings(
    settings: Settings, hardware: Hardware, folder: Path, overrides: Sequence[str]
) -> Iterator[TrainingSetup]:
    """Yield the setup of every stage left to train, each after the stage before it has ended;
    a finished run has none left.

    Raises:
        UserError: the settings are invalid.
    """
    stages = stages_of(settings)
    for stage in stages:
        source = make_sequence_source(stage.settings, fixed=compiles(stage.settings, hardware))
        # Says what does not suit before the first stage trains.
        trained_config(stage.settings, source.shape)
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
            first, start = first + 1, resumed.saved
        elif over or resumed.step >= stages[first].steps:
            finished = read_summary(folder).get("status") == FINISHED
            if first + 1 == len(stages) and finished:  # what it measured stays
                say(f"the run in {folder} is finished: nothing is left to train.")
                return
        say(
            f"resuming from {resumed.checkpoint} ({stages[resumed.stage].name}, "
            f"step {resumed.step})"
        )

    for stage in stages[first:]:
        again = resumed if resumed is not None and stage.number == resumed.stage else None
        curve.begin_stage(stage)
        prepared, model = _prepare(stage, hardware, folder, curve, start=start, resumed=again)
        if curve.rows and stage.number == first:
            curve.write()
        yield prepared
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        start = SavedClassifier(
            model.config, state, describe_stage(stage, model), folder / CHECKPOINTS / LAST
        )
    if curve.rows and is_first_rank():
        _publish(settings, folder, curve, overrides)


def _prepare(
    stage: Stage,
    hardware: Hardware,
    folder: Path,
    curve: LearningCurve,
    *,
    start: SavedClassifier | None,
    resumed: Resumed | None,
) -> tuple[TrainingSetup, Classifier]:
    """Return the setup that trains one stage, and the stage's model. start: the weights that
    the model starts from; None: random ones."""
    settings = stage.begin(folder)
    source = make_sequence_source(settings, fixed=compiles(settings, hardware))
    model = make_classifier(settings, hardware, source.shape)
    if start is not None:
        carry_weights(model, start.config, start.state)
    if resumed is not None:
        check_same(resumed, model.config)
    batching = choose_stage_batching(settings, hardware, model)
    model.save_memory(batching.savings)
    data = make_data(
        settings, hardware, source, micro_batch=batching.micro_batch, accumulate=batching.accumulate
    )
    description = describe_stage(stage, model)
    read = pixels_read(settings, source.shape.length)
    length = read * source.shape.towers
    throughput = Throughput(
        model.flops_per_sample(read) / length,
        tokens_per_step=stage.batch * length,
        peak_flops=hardware.peak_flops,
    )
    by_accuracy = settings.sequence.classification_weight > 0
    monitor, mode = ("validation_accuracy", "max") if by_accuracy else ("validation_loss", "min")
    goes_on = stage.number + 1 < stage.count
    best = BestOfStage(model, monitor, mode)

    def lines() -> Iterator[str]:
        source.prepare()
        yield source.describe()
        yield describe_stage_line(stage, hardware, model, batching)
        samples, every = settings.sequence.validation_samples, settings.trainer.validate_every
        yield describe_validation(
            data.held_out_samples, samples, every, "sequence.validation_samples"
        )

    def before_saving() -> None:
        # what is saved after it has the curve's last row, too
        if best.restore():
            say(f"{stage.name}: the next stage starts from its best weights, of step {best.step:,}")

    prepared = TrainingSetup(
        data,
        make_task(settings, hardware, model, description),
        throughput,
        batching,
        description,
        lines(),
        row=lambda trainer: _found(trainer, curve, model, throughput, batching.micro_batch, length),
        advice=_ADVICE,
        monitor=monitor,
        mode=mode,
        callbacks=[curve, best] if goes_on else [curve],
        stage=StageContext(
            # Dropout draws by the run's seed in all stages.
            settings.having(resume=None, seed=stage.settings.seed),
            resumed.checkpoint if resumed else None,
            folder / stage.folder,
            goes_on,
            before_saving if goes_on else None,
        ),
    )
    return prepared, model


def _found(
    trainer: pl.Trainer,
    curve: LearningCurve,
    model: Classifier,
    throughput: Throughput,
    micro_batch: int,
    length: int,
) -> dict[str, Any]:
    """Return the columns of summary.json that are known once a stage has ended. length: how many
    tokens of each sample the model reads in training."""
    found = {name: metric(trainer, f"validation_{name}") for name in ("accuracy", "loss")}
    if not any(found.values()) and curve.rows:  # nothing was left to do
        found = {name: float(curve.rows[-1][f"validation_{name}"]) for name in found}
    measured = throughput.columns()
    rate = measured["tokens_per_second"]
    return {
        **curve.made(),  # fewer than planned, where stages ended early
        "context": model.config.length,
        "parameters": sum(value.numel() for value in model.state_dict().values()),
        "micro_batch": micro_batch,
        **{f"validation_{name}": value for name, value in found.items()},
        "samples_per_second": None if rate is None else round(rate / length, 2),
        **measured,
        "minutes": round(curve.minutes, 2),
    }


def _publish(
    settings: Settings, folder: Path, curve: LearningCurve, overrides: Sequence[str]
) -> None:
    """Write the learning curve's rows to result.json, and for Pathfinder also its figure."""
    command = command_line(overrides, without=("output", "logger", "hydra", "resume"))
    rows = [{"implementation": "flashtrain", **row} for row in curve.rows]
    write_result(folder / RESULT, settings.recipe, command, rows)
    if settings.sequence.data == "pathfinder" and rows:
        curriculum_figure(rows, (folder / CURVE).with_suffix(".png"))


def _starting_weights(settings: Settings) -> SavedClassifier | None:
    """Return the classifier that the setting `weights` names: a .safetensors file, a
    checkpoint, or a run folder, whose best checkpoint it is; None where it is not set."""
    if settings.weights is None:
        return None
    path = Path(settings.weights).expanduser()
    if path.suffix != SUFFIX and path.is_dir():
        _, path = find_checkpoint(settings.weights, prefer=BEST)
    saved = read_classifier(path)
    say(f"starting from the weights in {path}")
    return saved
