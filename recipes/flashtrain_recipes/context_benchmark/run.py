"""recipe=long-context-benchmark: attention over several devices, by every way in every layout and by others; tables,
and efficiency against length, a panel for each mask and a line for each baseline.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import values_of
from flashtrain.report.table import Table, View, make_table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.context_benchmark.baseline import ContextBaseline
from flashtrain_recipes.context_benchmark.baselines import everyone
from flashtrain_recipes.context_benchmark.cases import ContextCase, cases
from flashtrain_recipes.context_benchmark.launch import Event, Job, joined, launched, started_by_torchrun
from flashtrain_recipes.context_benchmark.rows import extrapolated
from flashtrain_recipes.harness.benchmark import Benchmark
from flashtrain_recipes.harness.rows import Row, Rows
from flashtrain_recipes.harness.run_folder import Run

FEWEST_RANKS_ON_A_CPU = 4  # processes may be more than cores: slow, but what a test needs
_SHAPE = ("heads", "kv_heads", "head_dim", "dtype", "degree")
_MEASURES = (
    "forward_ms", "backward_ms", "one_device_ms", "one_device", "efficiency", "tflops_per_device",
    "communication_share", "sent_mib", "imbalance", "peak_memory_gib", "error_ratio",
)  # fmt: skip


def efficiency_figure(rows: Rows, path: str | Path) -> Path:
    """A panel a mask. UserError: no shape was measured at two lengths."""
    drawn = [{**row, _panel(row["mask"]): row["efficiency"]} for row in rows if row.get("efficiency") is not None]
    if len(values_of(drawn, "seqlen")) < 2:
        raise UserError("no shape was measured at two lengths: there is no curve to draw.")
    panels = [_panel(mask) for mask in values_of(drawn, "mask")]
    group = ["implementation", *(key for key in _SHAPE if len(values_of(drawn, key)) > 1)]
    return line_figure(drawn, "seqlen", panels, group, path, log_y=False, height=4.6)


def _panel(mask: str) -> str:
    return f"efficiency, {mask}"


class ContextBenchmark(Benchmark):
    """Every degree, shape, mask and length asked for. The ranks of a degree go through its cases and send rows here."""

    what = "attention over several devices"
    rate = "tflops_per_device"
    drawings = (("efficiency.png", efficiency_figure),)

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        self.degrees = degrees_of(settings, hardware)
        super().__init__(settings, hardware)

    def make_cases(self) -> list[ContextCase]:
        return cases(self.options, self.degrees)

    def make_baselines(self) -> list[ContextBaseline]:
        return everyone(self.options)

    def plan_line(self, case: ContextCase) -> str:
        refused = [f"; without {one.title} ({reason})" for one in self.baselines if (reason := one.refuses(case))]
        return f"{case}{''.join(refused)}"

    def run(self, folder: Path, *, overrides: list[str], started: float) -> dict[str, Any]:
        """As Benchmark.run. Under torchrun every rank calls this, and the first one writes.

        Raises RankFailed, in one line, for a rank that failed.
        """
        if started_by_torchrun() and os.environ["RANK"] != "0":
            for _ in self.events(math.inf):
                pass
            return {}
        return super().run(folder, overrides=overrides, started=started)

    def follow(self, run: Run) -> int:
        begun = 0
        with closing(self.events(run.until)) as events:
            for kind, number, content in events:
                case = self.cases[number]
                if kind == "failed":
                    write_atomically(run.folder / f"case-{number}.txt", content)
                elif kind == "measured":
                    rows, notes = content
                    for title, reason in notes:
                        run.note(str(case), title, reason)
                    self.end_case(run, [extrapolated(row, case, run.rows, self.cases) for row in rows])
                elif number >= begun:
                    self.begin_case(number)
                    begun = number + 1
        return begun

    def events(self, until: float) -> Generator[Event, None, None]:
        """What the ranks send, degree after degree. until: a moment of time.monotonic() after which none is begun."""
        start = joined if started_by_torchrun() else launched
        asked, kind, seed = self.options, self.hardware.kind, self.settings.seed
        for degree in self.degrees:
            todo = {number: case for number, case in enumerate(self.cases) if case.degree == degree}
            if min(todo) and time.monotonic() >= until:
                return
            with closing(start(Job(asked, kind, todo, self.baselines, seed, len(self.cases), until))) as events:
                yield from events

    def without(self, case: Any, baseline: Any, status: str, reason: str) -> list[Row]:
        return []

    def tables(self, rows: Rows) -> list[Table]:
        index = ["mask", *(key for key in _SHAPE if len(values_of(rows, key)) > 1), "seqlen"]
        shown = [key for key in (*index, "implementation", *_MEASURES) if values_of(rows, key)]
        title = "efficiency: time on one device / (devices x time on them)"
        found = [View(index, "implementation", "efficiency").table(rows, title)] if "efficiency" in shown else []
        return [*found, make_table(rows, shown, self.what)]


def degrees_of(settings: Settings, hardware: Hardware) -> list[int]:
    """Devices that share a sequence, ascending; torchrun's ranks all share one. UserError: more than there are."""
    most = hardware.count if hardware.kind == "cuda" else max(hardware.count, FEWEST_RANKS_ON_A_CPU)
    possible = [int(os.environ["WORLD_SIZE"])] if started_by_torchrun() else list(range(2, most + 1))
    degrees = sorted(set(settings.benchmark.degrees or [])) or [one for one in possible if one in (2, 4, 8)] or possible
    if not degrees or not set(degrees) <= set(possible):
        raise UserError(f"benchmark.degrees={degrees}: expected numbers among {possible} on these devices.")
    return degrees
