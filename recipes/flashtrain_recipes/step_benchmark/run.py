"""A whole benchmark of training steps: its cases one after the other, then tables, figure and the command's own cost.

The run's folder (session.py) also has context.png where several contexts were measured, and command/, the run folder
of the training command, where its cost was.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.report.rows import values_of
from flashtrain.run.plan import VOCABULARY
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import log_image, log_table
from flashtrain_recipes.attention_benchmark.clock import clock_for
from flashtrain_recipes.attention_benchmark.measure import OUT_OF_MEMORY, Row
from flashtrain_recipes.attention_benchmark.session import Session, session
from flashtrain_recipes.step_benchmark.case import StepCase
from flashtrain_recipes.step_benchmark.command_cost import COMMAND, command_row
from flashtrain_recipes.step_benchmark.contenders import Contender, choose_contenders
from flashtrain_recipes.step_benchmark.everything import FLASHTRAIN, all_contenders
from flashtrain_recipes.step_benchmark.figures import context_speed_figure
from flashtrain_recipes.step_benchmark.measure import NO_TIME, Effort, StepMeasurement
from flashtrain_recipes.step_benchmark.ours import precision_of
from flashtrain_recipes.step_benchmark.tables import best_rows, case_line, judged, paper_rows, step_tables

FIGURE = "context.png"
_RECOMPILATIONS = 64  # of one function: every implementation that shares it, at every batch


def benchmark_steps(
    settings: Settings, hardware: Hardware, folder: Path, *, overrides: list[str], started: float
) -> dict[str, Any]:
    """Measure what the settings name, in `folder`, and return the summary row; see start.benchmark."""
    todo = cases(settings)
    device = torch.device("cuda", torch.cuda.current_device()) if hardware.kind == "cuda" else torch.device("cpu")
    torch.set_float32_matmul_precision("high")  # as training does
    contenders = chosen_contenders(settings, hardware)
    say(describe(settings, hardware, todo, contenders))
    with session(settings, hardware, folder, overrides=overrides, started=started) as run:
        measured = _measure_all(settings, hardware, device, todo, contenders, run)
        if settings.benchmark.command_steps:
            _measure_command(settings, hardware, device, todo, contenders, run, overrides)
        run.results.rows = judged(run.results.rows)
        _report(run, measured, len(todo))
        return run.finish({"cases": len(todo), "cases_measured": measured, **_best(run.results.rows)})


def plan_steps(settings: Settings, hardware: Hardware) -> str:
    """mode=plan: the cases and the implementations, and nothing started."""
    todo = cases(settings)
    contenders = chosen_contenders(settings, hardware)
    device = torch.device("cuda" if hardware.kind == "cuda" else "cpu")
    lines = [describe(settings, hardware, todo, contenders)]
    for contender in contenders:
        reason = contender.missing(device)
        lines += [] if reason is None else [f"  left out: {contender.title}, {reason}"]
    lines += [f"  {case} batch {', '.join(map(str, batches_of(settings, case)))}" for case in todo]
    return "\n".join([*lines, "nothing was started; leave out mode=plan to measure."])


def cases(settings: Settings) -> list[StepCase]:
    """Every model, context and precision of weights asked for. Raises UserError for a model that is not GPT-2."""
    if settings.model.name != "gpt2":
        raise UserError(
            f"model={settings.model.name}: training steps of model=gpt2 are measured, which others have too."
        )
    asked = settings.benchmark
    vocab_size = VOCABULARY.get(settings.data.tokenizer, settings.data.vocab_size)
    return [
        StepCase(model, context, weights, vocab_size, settings.model.vocab_rows)
        for model in asked.models
        for weights in asked.weights
        for context in asked.contexts
    ]


def batches_of(settings: Settings, case: StepCase) -> list[int]:
    """The batches asked for, or the one that holds benchmark.tokens: one sequence where that is longer."""
    asked = settings.benchmark
    return sorted(set(asked.batches)) if asked.batches else [max(1, asked.tokens // case.context)]


def chosen_contenders(settings: Settings, hardware: Hardware) -> list[Contender]:
    """The implementations that benchmark.implementations names."""
    asked = settings.benchmark
    compiled = hardware.kind == "cuda" if asked.compile is None else asked.compile
    return choose_contenders(all_contenders(settings, hardware, compiled=compiled), asked.implementations)


def describe(settings: Settings, hardware: Hardware, todo: Sequence[StepCase], contenders: Sequence[Contender]) -> str:
    """The line that says what is about to be measured, on what."""
    asked = settings.benchmark
    limit = "" if asked.max_seconds is None else f", at most {asked.max_seconds:g} s"
    names = "; ".join(contender.title for contender in contenders)
    return (
        f"training steps: {len(todo)} cases, {asked.rounds} rounds of {asked.steps} steps{limit}, "
        f"on {hardware.name}: {names}"
    )


def _measure_all(
    settings: Settings,
    hardware: Hardware,
    device: torch.device,
    todo: Sequence[StepCase],
    contenders: Sequence[Contender],
    run: Session,
) -> int:
    """Measure case by case; returns how many were begun. What is left of the time is shared by the cases left."""
    asked, results = settings.benchmark, run.results
    clock = clock_for(device)
    for number, case in enumerate(todo):
        batches = batches_of(settings, case)
        left = run.seconds_left()
        if left is not None and left <= 0:
            for missed in todo[number:]:
                results.note(str(missed), "not measured", f"benchmark.max_seconds={asked.max_seconds:g} were over")
                results.rows += [_not_begun(missed, contender) for contender in contenders]
            results.save()
            return number
        say(f"[{number + 1}/{len(todo)}] {case} batch {', '.join(map(str, batches))}")
        with fresh_compiler(contenders):
            measurement = StepMeasurement(
                case,
                device,
                clock,
                seed=settings.seed,
                note=partial(results.note, str(case)),
                peak_flops=hardware.peak_flops,
                full=_known_full(contenders, case, batches, results.rows),
                expected=_expected(contenders, case, batches, results.rows),
            )
            share = None if left is None else left / (len(todo) - number)
            rows = measurement.run(contenders, batches, Effort(asked.rounds, asked.steps, share, run.until))
            del measurement
        gc.collect()  # models and their compiled graphs refer to each other
        clock.release()
        results.rows += rows
        results.save()
        say(f"    {case_line(rows)}")
        run.log_metrics(_metrics(rows), step=number)
    return len(todo)


def _measure_command(
    settings: Settings,
    hardware: Hardware,
    device: torch.device,
    todo: Sequence[StepCase],
    contenders: Sequence[Contender],
    run: Session,
    overrides: list[str],
) -> None:
    """Add the row of the command itself, at the first case and flashtrain's best batch there."""
    case, results = todo[0], run.results
    found = [row for row in best_rows(results.rows) if row["implementation"] == FLASHTRAIN and row.get("best_batch")]
    found = [row for row in found if (row["model"], row["context"], row["weights"]) == _key(case)]
    ours = [contender for contender in contenders if contender.title == FLASHTRAIN]
    left = run.seconds_left()
    if not found or not ours or (left is not None and left <= 0):
        why = "flashtrain has no figure to compare it with" if not found or not ours else NO_TIME
        results.note(str(case), COMMAND, why)
        return
    with fresh_compiler(contenders):
        row = command_row(
            case,
            found[0]["batch"],
            ours[0],
            device,
            clock_for(device),
            settings=settings,
            overrides=overrides,
            folder=results.folder,
            precision=precision_of(case, hardware.kind),
            peak_flops=hardware.peak_flops,
            seconds=left,
        )
    if "command_cost" in row:
        say(f"    the command's step takes {row['command_cost']:+.1f}% beside the bare loop's")
    results.rows.append(row)
    results.save()


def _report(run: Session, measured: int, wanted: int) -> None:
    """Print the tables, draw the figure, and log both."""
    results = run.results
    if not results.rows:
        say("nothing could be measured: notes.txt says why.")
        return
    found = best_rows(results.rows)
    for table in step_tables(results.rows):
        table.print()
    log_table(run.loggers, "rows", results.rows)
    log_table(run.loggers, "best_batches", found)
    if beside := paper_rows(found):
        log_table(run.loggers, "paper", beside)
    speedups = {f"speedup/{_name(row)}": row["speedup"] for row in found if row.get("speedup") is not None}
    if speedups:
        run.log_metrics(speedups, step=wanted)
    contexts = values_of([row for row in results.rows if row.get("tokens_per_second")], "context")
    if len(contexts) > 1:
        path = context_speed_figure(results.rows, results.folder / FIGURE)
        log_image(run.loggers, path.stem, path)
        say(f"figure: {path}")
    results.say_end(measured, wanted)


def _known_full(
    contenders: Sequence[Contender], case: StepCase, batches: Sequence[int], rows: Sequence[Row]
) -> dict[str, str]:
    """Implementations that ran out of memory at a shorter context with as many tokens: {name: in words}.

    Longer sequences need no less: activations go with the tokens, the S x S matrix with tokens times context.
    """
    found = {}
    for contender in contenders:
        for row in rows:
            same = (row["implementation"], row["model"], row["weights"]) == (contender.title, case.model, case.weights)
            if not same or row.get("status") != OUT_OF_MEMORY or row["batch"] is None:
                continue
            if row["context"] < case.context and row["batch"] * row["context"] <= min(batches) * case.context:
                found[contender.name] = f"not tried: a context of {row['context']:,} ran out of memory already"
    return found


def _expected(
    contenders: Sequence[Contender], case: StepCase, batches: Sequence[int], rows: Sequence[Row]
) -> dict[str, float]:
    """Seconds of each implementation's first two steps by what its latest case took: {name: seconds}.

    Compilation as there, and steps as much longer as they have more FLOPs.
    """
    found = {}
    for contender in contenders:
        for row in rows:
            same = (row["implementation"], row["model"]) == (contender.title, case.model)
            if same and row.get("milliseconds"):
                then = replace(case, context=row["context"])
                flops = case.flops_per_token() * min(batches) * case.context
                longer = flops / (then.flops_per_token() * row["batch"] * row["context"])
                found[contender.name] = row["compile_seconds"] + 2 * longer * row["milliseconds"] / 1e3
    return found


def _not_begun(case: StepCase, contender: Contender) -> Row:
    return {
        "implementation": contender.title,
        "model": case.model,
        "context": case.context,
        "batch": None,
        "weights": case.weights,
        "tokens_per_second": None,
        "status": NO_TIME,
    }


def _key(case: StepCase) -> tuple[str, int, str]:
    return (case.model, case.context, case.weights)


def _metrics(rows: Sequence[Row]) -> dict[str, float]:
    """A case's tokens/s by implementation and batch, for the loggers."""
    found = {}
    for row in rows:
        if row.get("tokens_per_second") is not None:
            found[f"tokens_per_second/{_name(row)}/{row['batch']}"] = row["tokens_per_second"]
    return found


def _name(row: Row) -> str:
    return f"{row['model']}/{row['context']}/{row['weights']}/{row['implementation']}"


def _best(rows: Sequence[Row]) -> dict[str, float]:
    """The summary's figures: flashtrain's tokens/s and speed-up for each case."""
    found = {}
    for row in best_rows(rows):
        if row["implementation"] == FLASHTRAIN and row.get("tokens_per_second"):
            case = f"{row['model']}_{row['context']}_{row['weights']}"
            found[f"tokens_per_second_{case}"] = row["tokens_per_second"]
            if row.get("speedup") is not None:
                found[f"speedup_{case}"] = row["speedup"]
    return found


@contextmanager
def fresh_compiler(contenders: Sequence[Contender]) -> Iterator[None]:
    """A compiler that knows nothing of other cases, and does not give up after a few batches of one function."""
    if not any(contender.compiled for contender in contenders):
        yield
        return
    import torch._dynamo.config  # seconds that nobody else needs to wait

    with torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS):
        try:
            yield
        finally:
            torch.compiler.reset()
