"""What the command costs beyond its training steps: `python -m flashtrain recipe=gpt2` beside the bare loop.

The command runs as it would for a user, in a process of its own, with its data, loggers, callbacks and Lightning's
Trainer; the bare loop is flashtrain's row, the same model's steps on one batch that lies on the device already.
"""

from __future__ import annotations

import math
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.command.compose import quoted
from flashtrain.folders.run_folder import FAILED, FINISHED, read_summary
from flashtrain.run.job_process import job_command
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.metrics_file import METRICS, read_metrics
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.rows import NO_TIME, Row
from flashtrain_recipes.harness.run_folder import Run
from flashtrain_recipes.step_benchmark.cases import GPT2Case

COMMAND = "flashtrain, the whole command"
_FOLDER, _OUTPUT = "command", "command.txt"
# The command has these groups of what this run was given; the rest is the recipe's.
_PASSED_ON = ("data", "logger", "model", "optimizer", "schedule", "attention", "memory", "hardware", "trainer")


def command_row(case: GPT2Case, bare: Row, benchmark: Benchmark, run: Run) -> Row:
    """The row of the command at this case: its steps as it logs them itself, and `command_cost`, what they take longer
    than the bare loop's, in percent. A command that fails is a row that says so. bare: flashtrain's row of the case."""
    summary = _run(command_words(case, benchmark.settings, run.overrides, benchmark.hardware), run)
    step_seconds = mean_step_seconds(run.folder / _FOLDER / METRICS)
    row = {"implementation": COMMAND, **case.columns()}
    if summary.get("status") != FINISHED or step_seconds is None:
        error = str(summary.get("error") or f"see {run.folder / _OUTPUT}")
        return {**row, "tokens_per_second": None, "status": summary.get("status") or FAILED, "error": error}
    milliseconds = step_seconds * 1e3
    return {
        **row,
        **case.rates(milliseconds, benchmark.hardware.peak_flops),
        "peak_memory_gib": summary.get("peak_memory_gib") if benchmark.hardware.kind == "cuda" else None,
        "milliseconds": round(milliseconds, 3),
        "bare_milliseconds": bare["milliseconds"],
        "command_cost": round(100 * (milliseconds / bare["milliseconds"] - 1), 2),
    }


def command_words(case: GPT2Case, settings: Settings, overrides: Sequence[str], machine: Hardware) -> list[str]:
    """The overrides of a training run of this case: what this run was given, its demo's data, steps of one batch."""
    steps, tokens = settings.benchmark.command_steps, case.batch * case.context
    own = {
        "context": case.context, "model.size": case.model, "model.vocab_rows": case.vocab_rows or "null",
        "data.tokenizer": settings.data.tokenizer, "data.validation_tokens": tokens, "trainer.tokens_per_step": tokens,
        "trainer.micro_batch": case.batch, "trainer.steps": steps, "trainer.validate_every": steps,
        "trainer.checkpoint_every": steps, "hardware.precision": case.hardware_of(machine).precision,
        "optimizer.master_weights": str(case.has_masters).lower(), "hardware.demo": "never", "generate.tokens": 1,
        "seed": settings.seed,
    }  # fmt: skip
    if settings.data.source == "stdlib":
        own["data.include_tests"] = str(settings.data.include_tests).lower()
    given = {word: word.lstrip("+~").split("=")[0] for word in overrides}
    passed = [word for word, key in given.items() if key.split(".")[0] in _PASSED_ON and key not in own]
    return ["recipe=gpt2", *passed, *[f"{key}={value}" for key, value in own.items()]]


def mean_step_seconds(metrics: Path) -> float | None:
    """Seconds of a step of the run that left this metrics.jsonl, the mean over all that it logged but the first time.

    The mean, since logging costs time at some steps only; the first time holds compilation. None where the run logged
    fewer than two times. Intervals are equally long.
    """
    if not metrics.is_file():
        return None
    logged = [row["step_seconds"] for row in read_metrics(metrics) if "step_seconds" in row]
    return statistics.mean(logged[1:]) if len(logged) > 1 else None


def _run(words: Sequence[str], run: Run) -> dict[str, Any]:
    """Run the command in the run's folder, its output in a file beside its own, and return its summary row."""
    place = run.folder / _FOLDER
    seconds = None if math.isinf(run.until) else run.seconds_left
    say(f"    the command itself: python -m flashtrain {' '.join(words)}")
    with (run.folder / _OUTPUT).open("w", encoding="utf-8") as output:
        command = [*job_command(), *words, f"hydra.run.dir={quoted(str(place.resolve()))}"]
        try:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"status": NO_TIME, "error": f"the command was ended after {seconds:.0f} s"}
    return read_summary(place)
