"""recipe=lra-speed: training speed of every task of the Long Range Arena by attention, all taking turns.

Dense flash attention, block-sparse, torch's SDPA and standard attention, compiled where that is wanted and eager, with
the model, length and batch of the task's recipe. Rows are random and of full length: what padding saves is not counted.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.command.compose import settings_of_recipe
from flashtrain.data.sequences.source import SequenceShape
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import log_table
from flashtrain_recipes.arena.build import classifier_config
from flashtrain_recipes.arena.speed_case import ClassifierStep, SpeedCase
from flashtrain_recipes.arena.stages import stages_of
from flashtrain_recipes.arena.tables import mean_speedups, speed_rows, speed_tables
from flashtrain_recipes.attention_benchmark.clock import clock_for
from flashtrain_recipes.attention_benchmark.measure import Row
from flashtrain_recipes.attention_benchmark.session import session
from flashtrain_recipes.step_benchmark.contenders import choose_contenders
from flashtrain_recipes.step_benchmark.measure import Effort, StepMeasurement

# The recipe that each task's model and batch come from, and what its samples are.
_TASKS = {
    "listops": ("lra-listops", SequenceShape(classes=10, length=2000, vocab_size=16)),
    "text": ("lra-text", SequenceShape(classes=2, length=4096)),
    "retrieval": ("lra-retrieval", SequenceShape(classes=2, length=4000, towers=2)),
    "image": ("lra-image", SequenceShape(classes=10, length=1024, side=32)),
    "pathfinder": ("lra-pathfinder", SequenceShape(classes=2, length=1024, side=32)),
    "pathx": ("pathx", SequenceShape(classes=2, length=16384, side=128)),
    "path256": ("path256", SequenceShape(classes=2, length=65536, side=256)),
}
_USUAL = tuple(_TASKS)[:-1]  # standard attention has no figure at 65,536 pixels


def benchmark_sequences(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row; see benchmarks.start.benchmark."""
    asked = settings.benchmark
    todo, contenders = cases(settings), chosen(settings, hardware)
    device = torch.device("cuda", torch.cuda.current_device()) if hardware.kind == "cuda" else torch.device("cpu")
    torch.set_float32_matmul_precision("high")
    say(plan_line(settings, hardware))
    clock = clock_for(device)
    with session(settings, hardware, folder, overrides=overrides, started=started) as run:
        results, measured = run.results, 0
        for number, case in enumerate(todo):
            left = run.seconds_left()
            if left is not None and left <= 0:
                results.note(str(case), "not measured", f"benchmark.max_seconds={asked.max_seconds:g} were over")
                continue
            batches = _batches(settings, case)
            say(f"[{number + 1}/{len(todo)}] {case} batch {', '.join(map(str, batches))}")
            measurement = StepMeasurement(
                case, device, clock, seed=settings.seed, note=partial(results.note, str(case))
            )
            share = None if left is None else left / (len(todo) - number)
            effort = Effort(asked.rounds, asked.steps, share, run.until)
            rows = [_row(row, contenders) for row in measurement.run(contenders, batches, effort)]
            del measurement
            gc.collect()
            torch.compiler.reset()
            clock.release()
            results.rows += rows
            results.save()
            measured += 1
            told = [
                f"{row['implementation']} {row['samples_per_second']:,.1f}" for row in rows if row["samples_per_second"]
            ]
            say(f"    samples/s: {'; '.join(told)}")
        results.rows = speed_rows(results.rows)
        for table in speed_tables(results.rows) if results.rows else []:
            table.print()
        log_table(run.loggers, "rows", results.rows)
        results.say_end(measured, len(todo))
        means = {f"mean_speedup_{row['implementation']}": row["mean_speedup"] for row in mean_speedups(results.rows)}
        return run.finish({"cases": len(todo), "cases_measured": measured, **means})


def plan_sequences(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: the cases and the implementations, and nothing started."""
    told = [f"  {case} batch {', '.join(map(str, _batches(settings, case)))}" for case in cases(settings)]
    lines = [plan_line(settings, hardware), *told]
    return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])


def plan_line(settings: Settings, hardware: Hardware) -> str:
    """The line that says what is about to be measured, on what."""
    names = "; ".join(contender.title for contender in chosen(settings, hardware))
    tasks = ", ".join(case.model for case in cases(settings))
    return f"training steps of {tasks}: {settings.benchmark.rounds} rounds on {hardware.name}: {names}"


def cases(settings: Settings) -> list[SpeedCase]:
    """The tasks that benchmark.tasks names, at benchmark.seqlens' longest length where that is shorter."""
    asked, found = settings.benchmark, []
    for name in asked.tasks or _USUAL:
        recipe, shape = _TASKS[name]
        stage = stages_of(settings_of_recipe(recipe))[-1]
        if asked.longest is not None and shape.length > asked.longest:
            side = None if shape.side is None else int(asked.longest**0.5)
            length = asked.longest if side is None else side * side
            shape = SequenceShape(shape.classes, length, shape.vocab_size, side, shape.towers)
        found.append(SpeedCase(name, classifier_config(stage.settings.classifier, shape), stage.batch))
    return found


def chosen(settings: Settings, hardware: Hardware) -> list[ClassifierStep]:
    """The implementations that benchmark.implementations names (None: all)."""
    wanted = settings.benchmark.compile
    compiled = hardware.kind == "cuda" if wanted is None else wanted
    kinds = [
        ("flash", "flashtrain", "flash", False),
        ("block-sparse", "flashtrain, block-sparse", "flash", True),
        ("sdpa", "PyTorch SDPA", "sdpa", False),
        ("standard", "standard attention", "standard", False),
    ]
    found = [
        ClassifierStep(f"{name}-eager", f"{title}, eager", attention=attention, compiled=False, sparse=sparse)
        for name, title, attention, sparse in kinds
    ]
    if compiled:
        found = [
            *(
                ClassifierStep(name, title, attention=attention, compiled=True, sparse=sparse)
                for name, title, attention, sparse in kinds
            ),
            *found,
        ]
    return choose_contenders(found, settings.benchmark.implementations)  # type: ignore[return-value]


def _batches(settings: Settings, case: SpeedCase) -> list[int]:
    """The batches asked for, or the one of the task's recipe."""
    return sorted(set(settings.benchmark.batches)) if settings.benchmark.batches else [case.batch]


def _row(row: Row, contenders: Sequence[ClassifierStep]) -> Row:
    """A row of StepMeasurement in this table's words."""
    contender = next(one for one in contenders if one.title == row["implementation"])
    told = {key: value for key, value in row.items() if key not in ("model", "context", "tokens_per_second", "mfu")}
    rate = row.get("tokens_per_second")
    return {
        "implementation": row["implementation"],
        "task": row["model"],
        "length": row["context"],
        **told,
        "samples_per_second": None if not rate else round(rate / row["context"], 3),
        "compiled": contender.compiled,
        "is_standard": contender.attention == "standard",
    }
