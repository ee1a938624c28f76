"""recipe=attention-benchmark: attention by every implementation, forward and backward, with the paper's two figures.

One case is one_case.py's. The run's folder (benchmark_runner/run.py) also has runtime.png, memory.png, ... where there
are several lengths of a shape. With rows=as-called what could not be measured is a row too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from flashtrain.announce import say
from flashtrain.report.rows import values_of
from flashtrain.report.table import Table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.attention_benchmark.cases import Case, cases
from flashtrain_recipes.attention_benchmark.figures import case_line, families, memory_figure, runtime_figure, tables
from flashtrain_recipes.attention_benchmark.one_case import Measurement, directions_of, row_of
from flashtrain_recipes.attention_benchmark.peers import choose_peers
from flashtrain_recipes.attention_benchmark.peers.pytorch import Sdpa
from flashtrain_recipes.attention_benchmark.settings import AS_CALLED
from flashtrain_recipes.attention_benchmark.warm import Task, warm_up
from flashtrain_recipes.benchmark_runner.measuring import OUT_OF_MEMORY, Effort, Event, Row, first_line
from flashtrain_recipes.benchmark_runner.run import EVERY_ROW, Benchmark, Run


class AttentionBenchmark(Benchmark):
    """The cases of benchmark.rows by the implementations in peers/."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.todo = cases(self.asked)
        device = torch.device("cuda" if hardware.kind == "cuda" else "cpu")
        self.as_called = self.asked.rows == "as-called"
        self.broken: dict[Task, str] = {}
        names = self.asked.implementations or (list(AS_CALLED) if self.as_called else None)
        self.peers, self.missing = choose_peers(names, device, matrices=not self.as_called)

    def line(self) -> str:
        asked = self.asked
        names = "; ".join(peer.title for peer in self.peers) or "nothing"
        return (
            f"attention benchmark: {len(self.todo)} cases (benchmark.rows={asked.rows}), {asked.dtype}, "
            f"{'+'.join(asked.directions)}, up to {asked.rounds} rounds{self.limit()}, on {self.hardware.name}: {names}"
        )

    def events(self, run: Run) -> Generator[Event, None, None]:
        """With rows=as-called on a GPU first all that is compiled once, in other processes."""
        left = run.seconds_left()
        seconds = self.asked.warm_seconds if left is None else min(self.asked.warm_seconds, left / 2)
        if self.as_called and self.device.type == "cuda" and seconds > 0:
            say(f"calling everything once, for {seconds:.0f} s at most")
            tasks = [
                (case, peer.name)
                for case in self.todo
                for peer in self.peers
                if not isinstance(peer, Sdpa) and peer.applies(case) and peer.refuses(case) is None
            ]
            try:
                self.broken = warm_up(tasks, "cuda", seconds)
            except OSError as error:  # no shared memory, no more processes: then they compile while measured
                run.note(EVERY_ROW, "calling everything once", first_line(error))
        yield from super().events(run)

    def measure(self, number: int, effort: Effort, run: Run) -> list[Row]:
        case = self.todo[number]
        try:
            measurement = Measurement(
                case,
                self.device,
                self.clock,
                seed=self.settings.seed + number,
                directions=self.asked.directions,
                note=partial(run.note, str(case)),
                as_called=self.as_called,
            )
            rows = measurement.run(self.peers, effort, check=self.asked.reference, broken=self.broken)
            del measurement
            self.clock.release()
        except torch.OutOfMemoryError:
            run.note(str(case), "the inputs", OUT_OF_MEMORY)
            rows = self._without_figures(case, OUT_OF_MEMORY, "the inputs") if self.as_called else []
            self.clock.release()
        except Exception as error:
            if not self.as_called:
                raise
            # One that breaks the GPU takes the following cases along: each of them says so.
            run.note(str(case), "the whole case", first_line(error))
            rows = self._without_figures(case, "failed", first_line(error))
        return rows

    def _without_figures(self, case: Case, status: str, reason: str) -> list[Row]:
        told = {"part": case.part, "status": status, "error": reason}
        title = self.peers[0].title if self.peers else "nothing"
        return [row_of(case, title, direction, **told) for direction in directions_of(case, self.asked.directions)]

    def not_begun(self, case: Case) -> list[Row]:
        reason = f"benchmark.max_seconds={self.asked.max_seconds} were over"
        return self._without_figures(case, "left out", reason) if self.as_called else []

    def completed(self, run: Run) -> list[Row]:
        """With rows=as-called those too that cannot be had here."""
        missing = self.missing if self.as_called else {}
        told = [{"part": "missing", "implementation": title, "status": "missing"} for title in missing]
        return run.rows + [{**row, "error": missing[row["implementation"]]} for row in told]

    def told(self, rows: Sequence[Row]) -> str:
        return case_line(rows)

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        """A case's TFLOP/s by implementation and direction."""
        return {
            f"tflops/{row['direction']}/{row['implementation']}": row["tflops"]
            for row in rows
            if row.get("tflops") is not None
        }

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return tables(rows)

    def figures(self, run: Run) -> Iterator[tuple[str, Path]]:
        """Time and memory against length, where there are several lengths of a shape."""
        if not self.as_called and families(run.rows):
            for draw, name in ((runtime_figure, "runtime"), (memory_figure, "memory")):
                if name == "runtime" or values_of(run.rows, "peak_memory_mib"):
                    yield name, draw(run.rows, run.folder / f"{name}.png")

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """Our fastest row in each direction, in TFLOP/s."""
        ours = [row for row in rows if row["implementation"] == "flashtrain" and row.get("tflops") is not None]
        return {
            f"tflops_{direction}": max(row["tflops"] for row in ours if row["direction"] == direction)
            for direction in ("forward", "backward")
            if any(row["direction"] == direction for row in ours)
        }
