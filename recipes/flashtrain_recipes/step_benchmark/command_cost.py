"""What the command costs beyond its training steps: `python -m flashtrain recipe=gpt2` beside the bare loop.

The command runs as it would for a user, in a process of its own, with its data, loggers, callbacks and Lightning's
Trainer; the bare loop makes the same model's steps on one batch that lies on the device already. The bare loop is
measured before and after, since a device's clocks drift.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.command.compose import quoted
from flashtrain.folders.run_folder import FAILED, FINISHED, read_summary
from flashtrain.run.job_process import job_command
from flashtrain.settings.settings import Settings
from flashtrain.training.metrics_file import METRICS, read_metrics
from flashtrain_recipes.benchmark_runner.measuring import Clock, Row
from flashtrain_recipes.step_benchmark.measure import NO_TIME, case_columns, rates
from flashtrain_recipes.step_benchmark.training_step import Contender, StepCase

COMMAND = "flashtrain, the whole command"
_ROUNDS = 5
_FOLDER, _OUTPUT = "command", "command.txt"
# What the command is told as this run was told it; the rest is the recipe's.
_PASSED_ON = ("data", "logger", "model", "optimizer", "schedule", "attention", "memory", "hardware", "trainer")


def command_row(
    case: StepCase,
    batch: int,
    contender: Contender,
    device: torch.device,
    clock: Clock,
    *,
    settings: Settings,
    overrides: Sequence[str],
    folder: Path,
    precision: str,
    peak_flops: float | None,
    seconds: float | None = None,
) -> Row:
    """The row of the command at this case and batch: its steps as it logs them itself, and `command_cost`, what they
    take longer than the bare loop's, in percent. A command that fails is a row that says so.

    folder: the run's; the command's own run folder is made in it. precision: Lightning's name, as the case computes.
    seconds: after which the command is ended; None: never.
    """
    step = contender.build(case, batch, device)
    tokens, labels = case.draw(batch, device, settings.seed)

    def bare() -> float:
        step(tokens, labels)
        step(tokens, labels)
        found = [
            clock.steps(lambda: step(tokens, labels), max(1, settings.benchmark.steps // 2)) for _ in range(_ROUNDS)
        ]
        step.drop_gradients()
        clock.release()
        return statistics.median(found)

    before = bare()
    summary = _run(command_words(case, batch, settings, overrides, precision), folder, seconds)
    step_seconds = mean_step_seconds(folder / _FOLDER / METRICS)
    row = case_columns(COMMAND, case, batch)
    if summary.get("status") != FINISHED or step_seconds is None:
        error = str(summary.get("error") or f"see {folder / _OUTPUT}")
        return {**row, "tokens_per_second": None, "status": summary.get("status") or FAILED, "error": error}
    loop = statistics.mean([before, bare()])
    milliseconds = step_seconds * 1e3
    return {
        **row,
        **rates(case, batch, milliseconds, peak_flops),
        "peak_memory_gib": summary.get("peak_memory_gib") if device.type == "cuda" else None,
        "milliseconds": round(milliseconds, 3),
        "bare_milliseconds": round(loop, 3),
        "command_cost": round(100 * (milliseconds / loop - 1), 2),
    }


def command_words(
    case: StepCase, batch: int, settings: Settings, overrides: Sequence[str], precision: str
) -> list[str]:
    """The overrides of a training run of this case: what this run was told, its demo's data, and steps of one batch."""
    steps = settings.benchmark.command_steps
    tokens = batch * case.context
    own = {
        "recipe": "gpt2",
        "context": case.context,
        "model.size": case.model,
        "model.vocab_rows": "null" if case.vocab_rows is None else case.vocab_rows,
        "data.tokenizer": settings.data.tokenizer,
        "data.validation_tokens": tokens,
        "trainer.tokens_per_step": tokens,
        "trainer.micro_batch": batch,
        "trainer.steps": steps,
        "trainer.validate_every": steps,
        "trainer.checkpoint_every": steps,
        "hardware.precision": precision,
        "optimizer.master_weights": str(case.has_masters).lower(),
        "hardware.demo": "never",
        "generate.tokens": 1,
        "seed": settings.seed,
    }
    if settings.data.source == "stdlib":
        own["data.include_tests"] = str(settings.data.include_tests).lower()
    passed = [word for word in overrides if word.lstrip("+~").split("=")[0].split(".")[0] in _PASSED_ON]
    kept = [word for word in passed if word.lstrip("+~").split("=")[0] not in own]
    first = [f"recipe={own.pop('recipe')}"]
    return [*first, *kept, *[f"{key}={value}" for key, value in own.items()]]


def mean_step_seconds(metrics: Path) -> float | None:
    """Seconds of a step of the run that left this metrics.jsonl, the mean over all that it logged but the first time.

    The mean, since logging costs time at some steps only; the first time holds compilation. None where the run logged
    fewer than two times. Intervals are equally long.
    """
    if not metrics.is_file():
        return None
    logged = [row["step_seconds"] for row in read_metrics(metrics) if "step_seconds" in row]
    return statistics.mean(logged[1:]) if len(logged) > 1 else None


def _run(words: Sequence[str], folder: Path, seconds: float | None) -> dict[str, Any]:
    """Run the command in folder/command, its output in a file beside it, and return its summary row."""
    place = folder / _FOLDER
    say(f"    the command itself: python -m flashtrain {' '.join(words)}")
    with (folder / _OUTPUT).open("w", encoding="utf-8") as output:
        command = [*job_command(), *words, f"hydra.run.dir={quoted(str(place.resolve()))}"]
        try:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"status": NO_TIME, "error": f"the command was ended after {seconds:.0f} s"}
    return read_summary(place)
