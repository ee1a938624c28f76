"""A whole benchmark of attention: its cases one after the other, then the tables and the paper's figures.

The run's folder (session.py) also has runtime.png, memory.png, ... where there are several lengths of a shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.report.rows import values_of
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.attention_benchmark.case import Case
from flashtrain_recipes.attention_benchmark.clock import clock_for
from flashtrain_recipes.attention_benchmark.figures import families, memory_figure, runtime_figure
from flashtrain_recipes.attention_benchmark.measure import Effort, Measurement, Row
from flashtrain_recipes.attention_benchmark.peers import Peer, choose_peers
from flashtrain_recipes.attention_benchmark.presets import cases
from flashtrain_recipes.attention_benchmark.session import EVERY_ROW, Results, Session, session
from flashtrain_recipes.attention_benchmark.tables import case_line, tables


def benchmark_attention(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row.

    started: time.time() at the command's start, from which benchmark.max_seconds counts. Raises UserError for what the
    user can mend, Stopped after a signal; the rows until then are in result.json.
    """
    asked = settings.benchmark
    device = torch.device("cuda", torch.cuda.current_device()) if hardware.kind == "cuda" else torch.device("cpu")
    todo = cases(asked)
    peers, missing = choose_peers(asked.implementations, device)
    say(describe(settings, hardware, todo, peers))
    with session(settings, hardware, folder, overrides=overrides, started=started) as run:
        for title, reason in missing.items():
            run.results.note(EVERY_ROW, title, reason)
        measured = _measure_all(settings, device, todo, peers, run)
        run.report(tables, _figures, measured, len(todo))
        found = {"cases": len(todo), "cases_measured": measured, **_best(run.results.rows)}
        return run.finish(found)


def describe(settings: Settings, hardware: Hardware, todo: Sequence[Case], peers: Sequence[Peer]) -> str:
    """The line that says what is about to be measured, on what."""
    asked = settings.benchmark
    limit = "" if asked.max_seconds is None else f", at most {asked.max_seconds:g} s"
    names = "; ".join(peer.title for peer in peers) or "nothing"
    return (
        f"attention benchmark: {len(todo)} cases (benchmark.rows={asked.rows}), {asked.dtype}, "
        f"{'+'.join(asked.directions)}, up to {asked.rounds} rounds{limit}, on {hardware.name}: {names}"
    )


def plan_attention(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: the cases and the implementations, and nothing started."""
    device = torch.device("cuda" if hardware.kind == "cuda" else "cpu")
    todo = cases(settings.benchmark)
    peers, missing = choose_peers(settings.benchmark.implementations, device)
    lines = [describe(settings, hardware, todo, peers)]
    lines += [f"  left out: {title}, {reason}" for title, reason in missing.items()]
    lines += [f"  {case}" for case in todo]
    return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])


def _measure_all(
    settings: Settings, device: torch.device, todo: Sequence[Case], peers: Sequence[Peer], run: Session
) -> int:
    """Measure case by case; returns how many were begun. What is left of the time is shared by the cases left."""
    asked, results = settings.benchmark, run.results
    clock = clock_for(device)
    for number, case in enumerate(todo):
        left = run.seconds_left()
        if left is not None and left <= 0:
            for missed in todo[number:]:
                results.note(str(missed), "not measured", f"benchmark.max_seconds={asked.max_seconds:g} were over")
            return number
        say(f"[{number + 1}/{len(todo)}] {case}")
        rows: list[Row] = []
        try:
            measurement = Measurement(
                case,
                device,
                clock,
                seed=settings.seed + number,
                directions=asked.directions,
                note=partial(results.note, str(case)),
            )
            share = None if left is None else left / (len(todo) - number)
            rows = measurement.run(peers, Effort(asked.rounds, share, run.until), check=asked.reference)
            del measurement
        except torch.OutOfMemoryError:
            results.note(str(case), "the inputs", "out of memory")
        clock.release()
        results.rows += rows
        results.save()
        say(f"    {case_line(rows)}")
        run.log_metrics(_metrics(rows), step=number)
    return len(todo)


def _figures(results: Results) -> Iterator[tuple[str, Path]]:
    """Draw time and memory against length, where there are several lengths of a shape."""
    if families(results.rows):
        for draw, name in ((runtime_figure, "runtime"), (memory_figure, "memory")):
            if name == "runtime" or values_of(results.rows, "peak_memory_mib"):
                yield name, draw(results.rows, results.folder / f"{name}.png")


def _metrics(rows: Sequence[Row]) -> dict[str, float]:
    """A case's TFLOP/s by implementation and direction, for the loggers."""
    return {
        f"tflops/{row['direction']}/{row['implementation']}": row["tflops"]
        for row in rows
        if row.get("tflops") is not None
    }


def _best(rows: Sequence[Row]) -> dict[str, float]:
    """The summary's figures: our fastest row in each direction, in TFLOP/s."""
    ours = [row for row in rows if row["implementation"] == "flashtrain" and row.get("tflops") is not None]
    return {
        f"tflops_{direction}": max(row["tflops"] for row in ours if row["direction"] == direction)
        for direction in ("forward", "backward")
        if any(row["direction"] == direction for row in ours)
    }
