"""`python -m flashtrain -m recipe=gpt2 context=512,1024`: every combination as a job, then
one table and one figure.

Each job runs in a fresh process, unlike in Hydra 1.3's own multirun. There Lightning's DDP would
start the whole sweep again in every rank; memory that one job leaves behind would spoil the next
job's measurement; and after a kill the same command would run all jobs again, into the same
folders, without a table. A job that fails becomes a row with its error; the other jobs still run.

runs/gpt2-sweep/2026-11-21_10-15-02/
  sweep.json              the jobs' settings: the same command with resume=auto continues this sweep
  00/, 01/, ...           the jobs, each a run folder like any other
  sweep.md, sweep.png   the table and the figure
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

from flashtrain.announce import say
from flashtrain.command.modes import plan
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.folders.new_folder import locked, make_unique
from flashtrain.folders.run_folder import (
    CHECKPOINTS,
    FAILED,
    FINISHED,
    LAST,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    read_summary,
    write_summary,
)
from flashtrain.folders.run_lock import Busy, hold, let_go, try_hold
from flashtrain.folders.same_training import newest_first
from flashtrain.report.sweep import report_sweep
from flashtrain.run.job import write_report
from flashtrain.run.job_process import JobProcesses
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine, quoted
from flashtrain.settings.settings import Settings

SWEEP_FILE = "sweep.json"
DONE = (FINISHED, OUT_OF_MEMORY)  # running out of memory is a result of a sweep, not a crash of it
_STOPPING_SECONDS = 120  # in which a job whose sweep was killed writes its checkpoint

Jobs = list[CommandLine]


def expand(line: CommandLine) -> Jobs:
    """Return the command line of each job of a sweep, one for every combination of the listed
    values, in the order given.

    Raises UserError for Hydra's interval(...) and glob(...), which list no values here.
    """
    choices: dict[str, list[str]] = {}
    for override in line.overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_choice_sweep() or override.is_range_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise UserError(
                f"{override.input_line} names no list of values: "
                "list the values, context=512,1024, or use range(start,stop,step)."
            )
    return [CommandLine(job) for job in itertools.product(*choices.values())]


def run_sweep(line: CommandLine) -> int:
    """Run every job of a sweep, write its table and figure, and return the exit
    status. Raises UserError.

    The status is 0, 1 if a job crashed, or 128 + the number of the signal that ended the sweep
    (the table then holds the jobs so far). resume=auto, or resume=FOLDER of a sweep, continues a
    sweep of the same words: finished jobs are not run again. Every job's settings are checked
    before the first job starts.
    """
    line.check_given_once()
    line, resume = _without_resume(line)
    jobs = expand(line)
    composed = [settings_of(job) for job in jobs]
    if any(one.mode == "plan" for one in composed):
        return _plan_each(composed, jobs)
    pairs = zip(composed, jobs, strict=True)
    settings = [adapt_to_machine(one, job, report=lambda *_: None)[0] for one, job in pairs]
    folder = _sweep_folder(settings[0], jobs, resume)
    try:
        return _run_locked(folder, jobs, settings[0])
    finally:
        let_go(folder)


def _plan_each(composed: Sequence[Settings], jobs: Jobs) -> int:
    """Print for mode=plan what each job of the sweep would do, start nothing, and return the exit
    status 0."""
    for number, (settings, job, label) in enumerate(
        zip(composed, jobs, _labels(jobs), strict=True), 1
    ):
        print(f"\n=== job {number} of {len(jobs)}: {label}", flush=True)
        print(plan(settings, job))
    return 0


def _labels(jobs: Jobs) -> list[str]:
    """Return a label for each job: those of its words that not all jobs have."""
    common = set(jobs[0]).intersection(*jobs)
    return [", ".join(word for word in job if word not in common) or "one job" for job in jobs]


def _run_locked(folder: Path, jobs: Jobs, first: Settings) -> int:
    group = first.logger.group or f"{first.recipe}-{folder.name}"
    folders = [folder / f"{number:02d}" for number in range(len(jobs))]
    with JobProcesses() as processes:
        for number, (job, job_folder, label) in enumerate(
            zip(jobs, folders, _labels(jobs), strict=True), 1
        ):
            done = read_summary(job_folder).get("status") in DONE
            print(
                f"\n=== job {number} of {len(jobs)}: {label}{', already done' if done else ''}",
                flush=True,
            )
            if done:
                continue
            _wait_for_orphan(job_folder)
            status = processes.run(_job_words(job, job_folder, group))
            stopped_by = processes.stopped_by
            note_failure(
                job_folder, job, status, stopped_by=None if stopped_by is None else stopped_by.name
            )
            if stopped_by is not None:
                print(f"Stopped by {stopped_by.name}. The table has the jobs so far.", flush=True)
                print(
                    f"Continue with the same command plus resume=auto or resume={folder}",
                    flush=True,
                )
                break

        report_sweep(folder)
        write_report(folder)
        names = [
            name for name in ("sweep.md", "sweep.png", "report.html") if (folder / name).exists()
        ]
        print(f"the sweep's folder is {folder} ({', '.join(names)})", flush=True)
        if processes.stopped_by is not None:
            return 128 + processes.stopped_by
    return int(_has_more(folder, len(jobs)))


def _without_resume(line: CommandLine) -> tuple[CommandLine, str | None]:
    """Return the line without a resume= that names a sweep (or is auto), and the value of resume=.
    A resume= that names a run, which every job continues, stays in the line; the value is then
    None."""
    given = line.by_name.get("resume")
    resume = None if given is None or given.is_sweep_override() else given.value()
    if resume != "auto" and not (
        resume and (Path(str(resume)).expanduser() / SWEEP_FILE).is_file()
    ):
        return line, None
    others = (word for word, one in zip(line, line.overrides, strict=True) if one is not given)
    return CommandLine(others), str(resume)


def _sweep_folder(settings: Settings, jobs: Jobs, resume: str | None) -> Path:
    """Return the locked folder of the sweep: the one that `resume` names, for resume=auto the
    newest unfinished sweep of these jobs that no process has locked, else a new one. Raises
    UserError."""
    parent = Path(settings.output) / f"{settings.recipe}-sweep"
    if resume not in (None, "auto"):
        folder = Path(str(resume)).expanduser()
        if not _is_of(jobs, folder):
            raise UserError(
                f"resume={resume} is a sweep of other settings. Repeat the command that started it."
            )
        hold(folder)
        return folder
    if resume == "auto":
        sweeps = (one for one in newest_first(parent) if (one / SWEEP_FILE).is_file())
        same = [one for one in sweeps if _is_of(jobs, one)]
        for folder in same:
            if _has_more(folder, len(jobs)) and try_hold(folder):
                say(f"continuing {folder}: finished jobs are not run again.")
                return folder
        latest = f" (finished, or another process's: {same[0]})" if same else ""
        say(f"resume=auto: no unfinished sweep with these settings{latest}; starting a new one.")
    folder = make_unique(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))
    hold(folder)
    write_atomically(folder / SWEEP_FILE, json.dumps({"jobs": jobs}, indent=1) + "\n")
    return folder


def _is_of(jobs: Jobs, folder: Path) -> bool:
    """Return whether the folder's sweep.json lists these jobs; what it lists is compared, and never
    run."""
    there = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))["jobs"]
    return [sorted(job) for job in jobs] == [sorted(job) for job in there]


def _has_more(folder: Path, count: int) -> bool:
    return any(
        read_summary(folder / f"{number:02d}").get("status") not in DONE for number in range(count)
    )


def _job_words(job: CommandLine, folder: Path, group: str) -> list[str]:
    """Return the words of the command for one job; with resume=auto if its folder has a
    checkpoint."""
    words = list(job)
    if (folder / CHECKPOINTS / LAST).exists():
        words = [*(word for word in job if not word.startswith("resume=")), "resume=auto"]
    return [*words, f"logger.group={quoted(group)}", f"hydra.run.dir={quoted(str(folder))}"]


def _wait_for_orphan(folder: Path) -> None:
    """Make a job's folder if it is missing, and wait while a job of a killed sweep still writes to
    it."""
    try:
        hold(folder)
    except Busy as error:
        say(
            f"{error} Waiting up to {_STOPPING_SECONDS} s for that job; "
            "if it still runs then, the sweep ends."
        )
        hold(folder, wait=_STOPPING_SECONDS)
    let_go(folder)


def note_failure(
    folder: Path, job: Sequence[str], status: int, *, stopped_by: str | None = None
) -> None:
    """Write the summary row of a job that could not write its own, because it was killed or
    ended before it began.

    Args:
        status: the job's exit status; if a signal killed the job, minus the signal's number.
        stopped_by: the name of the signal that ended the whole sweep, such as SIGINT; None
            if only this job ended.
    """
    row = read_summary(folder)
    if row.get("status", RUNNING) != RUNNING:
        return
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    ended = {"status": FAILED, "error": how}
    if stopped_by is not None:
        ended = {"status": STOPPED, "error": f"stopped by {stopped_by}"}
    with contextlib.suppress(Busy), locked(folder):  # else it still runs, and writes its row itself
        write_summary(folder, {"overrides": " ".join(job), **row, **ended})
