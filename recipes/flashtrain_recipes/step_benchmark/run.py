"""A benchmark of training steps, of any models: each case's contenders take turns (measure.py). And that of GPT-2,
recipe=gpt2-speed and recipe=context-speed.

The run's folder (benchmark_runner/run.py) also has context.png where several contexts were measured, and command/, the
run folder of the training command, where its cost was.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.report.rows import values_of
from flashtrain.report.table import Table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.loggers import log_table
from flashtrain_recipes.benchmark_runner.measuring import OUT_OF_MEMORY, Effort, Row
from flashtrain_recipes.benchmark_runner.run import Benchmark, Run
from flashtrain_recipes.step_benchmark.command_cost import COMMAND, command_row
from flashtrain_recipes.step_benchmark.contenders import FLASHTRAIN, all_contenders, precision_of
from flashtrain_recipes.step_benchmark.figures import (
    best_rows,
    case_line,
    context_speed_figure,
    judged,
    paper_rows,
    step_tables,
)
from flashtrain_recipes.step_benchmark.measure import NO_TIME, StepMeasurement, case_columns
from flashtrain_recipes.step_benchmark.training_step import Contender, StepCase, cases

FIGURE = "context.png"
_RECOMPILATIONS = 64  # of one function: every implementation that shares it, at every batch


class StepBenchmark(Benchmark):
    """contenders: the implementations that benchmark.implementations names, those that cannot be had here among them:
    each of those has a row that says why."""

    contenders: Sequence[Any]

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        names, compiled = self.asked.implementations, self.asked.compile
        everyone = self.everyone(hardware.kind == "cuda" if compiled is None else compiled)
        self.contenders = [one for one in everyone if names is None or one.name in names]

    def everyone(self, compiled: bool) -> Sequence[Contender]:
        """All implementations, in their own order. compiled: whether those that are compiled on a GPU are so here."""
        raise NotImplementedError

    def batches_of(self, case: Any) -> list[int]:
        """The batches asked for, or the one that holds benchmark.tokens: one sequence where that is longer."""
        asked = self.asked
        return sorted(set(asked.batches)) if asked.batches else [max(1, asked.tokens // case.context)]

    def case_line(self, case: Any) -> str:
        return f"{case} batch {', '.join(map(str, self.batches_of(case)))}"

    def prepared(self) -> Sequence[Any]:
        torch.set_float32_matmul_precision("high")  # as training does
        return self.todo

    def taking_part(self, case: Any) -> Sequence[Any]:
        """The implementations that differ in this case."""
        return self.contenders

    def together(self, case: Any) -> list[list[int]]:
        """Its batches, those together that take turns with one another."""
        return [self.batches_of(case)]

    def known(self, case: Any, rows: Sequence[Row]) -> dict[str, Any]:
        """What StepMeasurement may know of the case beforehand, from the rows until now."""
        return {}

    def row(self, row: Row, case: Any, batches: Sequence[int]) -> Row:
        """A row of StepMeasurement in this table's words."""
        return row

    def measure(self, number: int, effort: Effort, run: Run) -> list[Row]:
        case = self.todo[number]
        contenders = self.taking_part(case)
        found: list[Row] = []
        for batches in self.together(case):
            with fresh_compiler(contenders):
                measurement = StepMeasurement(
                    case,
                    self.device,
                    self.clock,
                    seed=self.settings.seed,
                    note=partial(run.note, str(case)),
                    **self.known(case, run.rows),
                )
                rows = measurement.run(contenders, batches, effort)
                found += [self.row(row, case, batches) for row in rows]
                del measurement
            gc.collect()  # models and their compiled graphs refer to each other
            self.clock.release()
        return found


class GPT2Steps(StepBenchmark):
    """Every model, context and precision of weights asked for, by the implementations in contenders.py."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.todo: list[StepCase] = cases(settings)
        super().__init__(settings, hardware)

    def everyone(self, compiled: bool) -> list[Contender]:
        return all_contenders(self.settings, self.hardware, compiled=compiled)

    def line(self) -> str:
        names = "; ".join(contender.title for contender in self.contenders)
        return (
            f"training steps: {len(self.todo)} cases, {self.asked.rounds} rounds of {self.asked.steps} "
            f"steps{self.limit()}, on {self.hardware.name}: {names}"
        )

    def left_out(self) -> Mapping[str, str]:
        device = torch.device("cuda" if self.hardware.kind == "cuda" else "cpu")
        return {one.title: reason for one in self.contenders if (reason := one.missing(device)) is not None}

    def known(self, case: StepCase, rows: Sequence[Row]) -> dict[str, Any]:
        batches = self.batches_of(case)
        return {
            "peak_flops": self.hardware.peak_flops,
            "full": known_full(self.contenders, case, batches, rows),
            "expected": expected_seconds(self.contenders, case, batches, rows),
        }

    def not_begun(self, case: StepCase) -> list[Row]:
        empty = {"tokens_per_second": None, "status": NO_TIME}
        return [{**case_columns(contender.title, case, None), **empty} for contender in self.contenders]

    def told(self, rows: Sequence[Row]) -> str:
        return case_line(rows)

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        """A case's tokens/s by implementation and batch."""
        return {
            f"tokens_per_second/{_name(row)}/{row['batch']}": row["tokens_per_second"]
            for row in rows
            if row.get("tokens_per_second") is not None
        }

    def completed(self, run: Run) -> list[Row]:
        if self.asked.command_steps:
            self._measure_command(run)
        return judged(run.rows)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return step_tables(rows)

    def log(self, run: Run) -> None:
        super().log(run)
        found = best_rows(run.rows)
        log_table(run.loggers, "best_batches", found)
        if beside := paper_rows(found):
            log_table(run.loggers, "paper", beside)
        speedups = {f"speedup/{_name(row)}": row["speedup"] for row in found if row.get("speedup") is not None}
        if speedups:
            run.log_metrics(speedups, step=len(self.todo))

    def figures(self, run: Run) -> Iterator[tuple[str, Path]]:
        if len(values_of([row for row in run.rows if row.get("tokens_per_second")], "context")) > 1:
            path = context_speed_figure(run.rows, run.folder / FIGURE)
            say(f"figure: {path}")
            yield path.stem, path

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """flashtrain's tokens/s and speed-up for each case."""
        found = {}
        for row in best_rows(rows):
            if row["implementation"] == FLASHTRAIN and row.get("tokens_per_second"):
                case = f"{row['model']}_{row['context']}_{row['weights']}"
                found[f"tokens_per_second_{case}"] = row["tokens_per_second"]
                if row.get("speedup") is not None:
                    found[f"speedup_{case}"] = row["speedup"]
        return found

    def _measure_command(self, run: Run) -> None:
        """Add the row of the command itself, at the first case and flashtrain's best batch there."""
        case = self.todo[0]
        found = [row for row in best_rows(run.rows) if row["implementation"] == FLASHTRAIN and row.get("best_batch")]
        key = (case.model, case.context, case.weights)
        found = [row for row in found if (row["model"], row["context"], row["weights"]) == key]
        ours = [contender for contender in self.contenders if contender.title == FLASHTRAIN]
        left = run.seconds_left()
        if not found or not ours or (left is not None and left <= 0):
            why = "flashtrain has no figure to compare it with" if not found or not ours else NO_TIME
            run.note(str(case), COMMAND, why)
            return
        with fresh_compiler(self.contenders):
            row = command_row(
                case,
                found[0]["batch"],
                ours[0],
                self.device,
                self.clock,
                settings=self.settings,
                overrides=run.overrides,
                folder=run.folder,
                precision=precision_of(case, self.hardware.kind),
                peak_flops=self.hardware.peak_flops,
                seconds=left,
            )
        if "command_cost" in row:
            say(f"    the command's step takes {row['command_cost']:+.1f}% beside the bare loop's")
        run.rows.append(row)
        run.save()


def known_full(
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


def expected_seconds(
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


def _name(row: Row) -> str:
    return f"{row['model']}/{row['context']}/{row['weights']}/{row['implementation']}"


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
