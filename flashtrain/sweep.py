"""`python -m flashtrain -m recipe=gpt2 context=512,1024`: every combination as a job, then one table and one figure.

Each job runs in a fresh process: under Hydra's own multirun Lightning's DDP would start the whole sweep again in every
rank, and memory that one job leaves behind would spoil the next one's measurement. A job that fails is a row that says
so; the others go on.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flashtrain.compose import compose_settings, parse_overrides, quoted
from flashtrain.errors import UserError
from flashtrain.heeded import check_heeded_by_a_job
from flashtrain.machine import settle
from flashtrain.report.sweep import report_sweep
from flashtrain.run_folder import (
    FAILED,
    FINISHED,
    OUT_OF_MEMORY,
    RUNNING,
    make_unique,
    read_summary,
    write_summary,
)
from flashtrain.settings import LoggerSettings
from flashtrain.training.loggers import log_figure


def expand(words: Sequence[str]) -> list[list[str]]:
    """The override lists of every job: the product of all values listed, in the order given.

    Raises UserError for a sweep over an interval or a glob, which name no finite list here.
    """
    choices: dict[str, list[str]] = {}
    for override in parse_overrides(words):
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_choice_sweep() or override.is_range_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise UserError(
                f"{override.input_line}: list the values, as in context=512,1024, or use range(start,stop,step)."
            )
    return [list(job) for job in itertools.product(*choices.values())]


def run_sweep(words: Sequence[str]) -> int:
    """Run every job of the sweep, report, and return the exit status: 0 unless a job crashed.

    Running out of memory is a result of a sweep, not a crash of it.
    Every job's settings are checked before the first one starts.
    """
    words = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    jobs = expand(words)
    composed = [compose_settings(job) for job in jobs]
    check_heeded_by_a_job(composed, jobs)
    settings = [settle(one, job, quiet=True)[0] for one, job in zip(composed, jobs, strict=True)]
    varying = [key for key in {word.split("=", 1)[0]: None for word in words} if _values(jobs, key) > 1]
    folder = make_unique(Path(settings[0].output) / f"{settings[0].recipe}-sweep", time.strftime("%Y-%m-%d_%H-%M-%S"))
    logger = settings[0].logger
    logger.group = logger.group or f"{settings[0].recipe}-{folder.name}"

    for number, job in enumerate(jobs):
        label = ", ".join(word for word in job if word.split("=", 1)[0] in varying) or "one job"
        print(f"\n=== job {number + 1} of {len(jobs)}: {label}", flush=True)
        job_folder = folder / f"{number:02d}"
        job_folder.mkdir()
        told = [word for word in job if not word.startswith(("logger.group=", "hydra.run.dir="))]
        status = _run_job([*told, f"logger.group={quoted(logger.group)}", f"hydra.run.dir={quoted(str(job_folder))}"])
        if status == -signal.SIGINT or status == 130:
            print("stopped by Ctrl-C: the table holds the jobs so far.", flush=True)
            break
        note_failure(job_folder, job, status)

    written = report_sweep(folder)
    _log_to_wandb(logger, folder, written)
    rows = [read_summary(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    return 1 if any(row.get("status") not in (FINISHED, OUT_OF_MEMORY) for row in rows) else 0


def job_command() -> list[str]:
    """How to start this program again: as `python -m flashtrain`, or as the user's own script that calls main()."""
    main_module = sys.modules["__main__"]
    spec = getattr(main_module, "__spec__", None)
    if spec is None:
        return [sys.executable, str(Path(sys.argv[0]).resolve())]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__")]


def _run_job(words: list[str]) -> int:
    process = subprocess.Popen([*job_command(), *words], env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # the job got the same Ctrl-C and is writing its checkpoint
        return 130


def note_failure(folder: Path, job: list[str], status: int) -> None:
    """A job that could not write how it ended (killed, or dead before it began) gets a row that says so."""
    row = read_summary(folder)
    if row.get("status", RUNNING) != RUNNING:
        return
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    write_summary(folder, {"overrides": " ".join(job), **row, "status": FAILED, "error": how})


def _values(jobs: list[list[str]], key: str) -> int:
    return len({word for job in jobs for word in job if word.split("=", 1)[0] == key})


def _log_to_wandb(logger: LoggerSettings, folder: Path, written: dict[str, Path]) -> None:
    """Log the sweep's figure beside its runs, in their group."""
    if logger.name == "wandb" and "figure" in written:
        log_figure(logger.project, group=logger.group, folder=folder, figure=written["figure"], mode=logger.mode)
