"""A whole benchmark of attention over several devices: ranks, cases, then tables and the figure.

The run's folder (session.py) also has efficiency.png where there are several lengths of a shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.attention_benchmark.session import EVERY_ROW, Results, Session, session
from flashtrain_recipes.context_benchmark.case import ContextCase
from flashtrain_recipes.context_benchmark.contenders import Contender
from flashtrain_recipes.context_benchmark.figures import efficiency_figure, families
from flashtrain_recipes.context_benchmark.grid import Event, Job
from flashtrain_recipes.context_benchmark.launch import RankFailed, joined, launched, started_by_torchrun
from flashtrain_recipes.context_benchmark.tables import case_line, tables

FIGURE, FAILURE = "efficiency.png", "failure.txt"
FEWEST_RANKS_ON_A_CPU = 4  # processes may be more than cores: slow, but what a test needs


def benchmark_context(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row; see start.benchmark.

    Under torchrun every rank calls this, and the first one writes. Raises RankFailed, in one line, for a rank that
    failed.
    """
    job, left_out = job_of(settings, hardware)
    limit = settings.benchmark.max_seconds
    job.until = None if limit is None else started + limit
    todo = job.cases()
    contenders, missing = job.contenders()
    if not contenders:
        raise UserError(_none_left(missing))
    outside = started_by_torchrun()
    if outside and os.environ["RANK"] != "0":
        with closing(joined(job)) as events:
            for _ in events:
                pass
        return {}
    say(describe(settings, hardware, job, todo, contenders))
    if left_out:
        say(left_out)
    with session(settings, hardware, folder, overrides=overrides, started=started) as run:
        for way, reason in missing.items():
            run.results.note(EVERY_ROW, way, reason)
        try:
            with closing(joined(job) if outside else launched(job)) as events:
                begun = _follow(events, job, todo, run)
        except RankFailed as error:
            if error.trace:
                write_atomically(folder / FAILURE, error.trace)
            raise
        for case in todo[begun:]:
            run.results.note(str(case), "not measured", f"benchmark.max_seconds={limit:g} were over")
        run.report(tables, _figures, begun, len(todo))
        return run.finish({"cases": len(todo), "cases_measured": begun, **_best(run)})


def plan_context(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: the cases and the contenders, and nothing started."""
    job, left_out = job_of(settings, hardware)
    todo = job.cases()
    contenders, missing = job.contenders()
    lines = [describe(settings, hardware, job, todo, contenders), *([left_out] if left_out else [])]
    lines += [f"  left out: {way}, {reason}" for way, reason in missing.items()]
    for case in todo:
        kept = [one for one in contenders if one.applies(case)]
        refused = [f"; without {one.title} ({reason})" for one in kept if (reason := one.refuses(case))]
        lines.append(f"  {case}{''.join(refused)}")
    return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])


def job_of(settings: Settings, hardware: Hardware) -> tuple[Job, str]:
    """What every rank is given, and a line about degrees that this machine is too small for ("" without any).

    Raises UserError where it is too small for all of them.
    """
    asked = settings.benchmark
    if started_by_torchrun():
        most, have = int(os.environ["WORLD_SIZE"]), "torchrun started {} ranks"
    elif hardware.kind == "cuda":
        most, have = hardware.count, "this machine has {} GPUs"
    else:
        most, have = max(hardware.count, FEWEST_RANKS_ON_A_CPU), "on a CPU there may be {} ranks"
    wanted = sorted(set(asked.degrees or [2, 4, 8]))
    degrees = [degree for degree in wanted if degree <= most]
    told = have.format(most)
    if not degrees:
        raise UserError(f"benchmark.degrees={wanted}: {told}. Possible: a degree of 2 to {most}, or more devices.")
    above = ", ".join(str(degree) for degree in wanted if degree > most)
    size = most if started_by_torchrun() else max(degrees)
    job = Job(asked, hardware.kind, size, degrees, settings.seed)
    return job, f"degrees {above} are left out: {told}" if above and asked.degrees else ""


def describe(
    settings: Settings,
    hardware: Hardware,
    job: Job,
    todo: Sequence[ContextCase],
    contenders: Sequence[Contender],
) -> str:
    """The line that says what is about to be measured, on what."""
    asked = settings.benchmark
    limit = "" if asked.max_seconds is None else f", at most {asked.max_seconds:g} s"
    names = "; ".join(one.title for one in contenders) or "nothing"
    return (
        f"attention over several devices: {len(todo)} cases, {asked.dtype}, up to {asked.rounds} rounds{limit}, on "
        f"{job.size} x {hardware.name}: {names}"
    )


def _follow(events: Iterator[Event], job: Job, todo: Sequence[ContextCase], run: Session) -> int:
    """Keep what the first rank tells; returns how many cases were begun."""
    results, begun = run.results, 0
    for event in events:
        case = todo[event.case]
        begun = max(begun, event.case + 1)
        if event.kind == "case":
            say(f"[{event.case + 1}/{len(todo)}] {case}")
        elif event.kind == "note":
            results.note(str(case), *event.told)
        else:
            results.rows += event.told
            results.save()
            say(f"    {case_line(event.told)}")
            run.log_metrics(_metrics(event.told), step=event.case)
    return begun


def _figures(results: Results) -> Iterator[tuple[str, Path]]:
    """Draw efficiency against length, where there are several lengths of a shape."""
    if families(results.rows):
        yield "efficiency", efficiency_figure(results.rows, results.folder / FIGURE)


def _metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {f"efficiency/{row['implementation']}": row["efficiency"] for row in rows if row.get("efficiency")}


def _best(run: Session) -> dict[str, float]:
    """The summary's figure: the highest efficiency of all rows whose one-device time was measured."""
    found = [row["efficiency"] for row in run.results.rows if row.get("efficiency") and row["one_device"] == "measured"]
    return {"best_efficiency": max(found)} if found else {}


def _none_left(missing: dict[str, str]) -> str:
    reasons = "; ".join(f"{way}: {reason}" for way, reason in missing.items())
    return f"benchmark.implementations names nothing that is here ({reasons}). Possible: flashtrain, plain-all-gather."
