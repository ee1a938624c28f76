"""The time that `python -m flashtrain recipe=gpt2` takes beyond its bare training steps.

The command runs as it would for a user, in its own process, with its data, loggers,
callbacks and Lightning's Trainer. The bare steps are those of flashtrain's row, on one
batch that is on the device already.
"""

from __future__ import annotations

import math
import statistics
import subprocess
from typing import Any

from flashtrain.announce import say
from flashtrain.folders.run_folder import FAILED, FINISHED, read_summary
from flashtrain.run.job_process import job_command
from flashtrain.settings.command_line import quoted
from flashtrain.training.metrics_file import METRICS, read_metrics
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.rows import NO_TIME, Row
from flashtrain_recipes.harness.run_folder import Run
from flashtrain_recipes.step_benchmark.cases import GPT2Case

COMMAND = "flashtrain, the whole command"
_FOLDER, _OUTPUT = "command", "command.txt"
# Groups of this run's settings that are passed on to the command; the others are the recipe's.
_PASSED_ON = (
    "data",
    "logger",
    "model",
    "optimizer",
    "schedule",
    "attention",
    "memory",
    "hardware",
    "trainer",
)


def command_row(case: GPT2Case, bare: Row, benchmark: Benchmark, run: Run) -> Row:
    """Run the command at a case, and return its row, in which `command_cost` is how many percent
    longer a step takes than in the row `bare`.

    A step's time is the mean of all logged step times but the first, which includes compilation. A
    command that fails becomes a row with its status and error.

    Args:
        bare: flashtrain's row at the same case, which gives the milliseconds of a
            step without the command.
    """
    summary = _run(_words(case, benchmark, run), run)
    metrics, row = run.folder / _FOLDER / METRICS, {"implementation": COMMAND, **case.columns()}
    steps = read_metrics(metrics) if metrics.is_file() else []
    logged = [one["step_seconds"] for one in steps if "step_seconds" in one]
    if summary.get("status") != FINISHED or len(logged) < 2:
        error = str(summary.get("error") or f"see {run.folder / _OUTPUT}")
        return {
            **row,
            "tokens_per_second": None,
            "status": summary.get("status") or FAILED,
            "error": error,
        }
    milliseconds = statistics.mean(logged[1:]) * 1e3
    return {
        **row,
        **case.rates(milliseconds, benchmark.hardware.peak_flops),
        "peak_memory_gib": summary.get("peak_memory_gib")
        if benchmark.hardware.kind == "cuda"
        else None,
        "milliseconds": round(milliseconds, 3),
        "bare_milliseconds": bare["milliseconds"],
        "command_cost": round(100 * (milliseconds / bare["milliseconds"] - 1), 2),
    }


def _words(case: GPT2Case, benchmark: Benchmark, run: Run) -> list[str]:
    # what this run was given, its demo's data, and steps of one batch
    settings = benchmark.settings
    steps = benchmark.options.command_steps
    tokens = case.batch * case.context
    own = {
        "context": case.context, "model.size": case.model,
        "model.vocab_rows": case.vocab_rows or "null",
        "data.tokenizer": settings.data.tokenizer, "data.validation_tokens": tokens,
        "trainer.tokens_per_step": tokens,
        "trainer.micro_batch": case.batch, "trainer.steps": steps, "trainer.validate_every": steps,
        "trainer.checkpoint_every": steps,
        "hardware.precision": case.hardware_of(benchmark.hardware).precision,
        "optimizer.master_weights": str(case.has_masters).lower(), "hardware.demo": "never",
        "generate.max_new_tokens": 1, "seed": settings.seed,
    }  # fmt: skip
    if settings.data.source == "stdlib":
        own["data.source"] = "stdlib"
        own["data.include_tests"] = str(settings.data.include_tests).lower()
    given = {word: word.lstrip("+~").split("=")[0] for word in run.overrides}
    passed = [
        word for word, key in given.items() if key.split(".")[0] in _PASSED_ON and key not in own
    ]
    return ["recipe=gpt2", *passed, *[f"{key}={value}" for key, value in own.items()]]


def _run(words: list[str], run: Run) -> dict[str, Any]:
    # in the run's folder, the output in a file there
    place = run.folder / _FOLDER
    seconds = None if math.isinf(run.until) else run.seconds_left
    say(f"    timing a whole training run: python -m flashtrain {' '.join(words)}")
    with (run.folder / _OUTPUT).open("w", encoding="utf-8") as output:
        command = [*job_command(), *words, f"hydra.run.dir={quoted(str(place.resolve()))}"]
        try:
            subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {"status": NO_TIME, "error": f"the command was ended after {seconds:.0f} s"}
    return read_summary(place)
