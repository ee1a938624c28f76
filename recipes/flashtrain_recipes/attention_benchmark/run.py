"""recipe=attention-benchmark: attention by every implementation, forward and backward, with the paper's two figures.

The run's folder (benchmark_runner/run.py) also has runtime.png, memory.png, ... where there are several lengths of a
shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from flashtrain.report.rows import values_of
from flashtrain.report.table import Table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.attention_benchmark.cases import cases
from flashtrain_recipes.attention_benchmark.figures import case_line, families, memory_figure, runtime_figure, tables
from flashtrain_recipes.attention_benchmark.measure import Measurement
from flashtrain_recipes.attention_benchmark.peers import choose_peers
from flashtrain_recipes.benchmark_runner.measuring import OUT_OF_MEMORY, Effort, Row
from flashtrain_recipes.benchmark_runner.run import Benchmark, Run


class AttentionBenchmark(Benchmark):
    """The cases of benchmark.rows by the implementations in peers/."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.todo = cases(self.asked)
        device = torch.device("cuda" if hardware.kind == "cuda" else "cpu")
        self.peers, self.missing = choose_peers(self.asked.implementations, device)

    def line(self) -> str:
        asked = self.asked
        names = "; ".join(peer.title for peer in self.peers) or "nothing"
        return (
            f"attention benchmark: {len(self.todo)} cases (benchmark.rows={asked.rows}), {asked.dtype}, "
            f"{'+'.join(asked.directions)}, up to {asked.rounds} rounds{self.limit()}, on {self.hardware.name}: {names}"
        )

    def measure(self, number: int, effort: Effort, run: Run) -> list[Row]:
        case, rows = self.todo[number], []
        try:
            measurement = Measurement(
                case,
                self.device,
                self.clock,
                seed=self.settings.seed + number,
                directions=self.asked.directions,
                note=partial(run.note, str(case)),
            )
            rows = measurement.run(self.peers, effort, check=self.asked.reference)
            del measurement
        except torch.OutOfMemoryError:
            run.note(str(case), "the inputs", OUT_OF_MEMORY)
        self.clock.release()
        return rows

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
        if families(run.rows):
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
