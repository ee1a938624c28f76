"""recipe=long-context-benchmark: attention over several devices, by every way in every layout and by others; tables,
and efficiency against length, a panel for each mask and a line for each contender.

The run's folder (benchmark_runner/run.py) also has efficiency.png where there are several lengths of a shape, and
failure.txt where a rank failed and could say where.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.report.figures import line_figure
from flashtrain.report.rows import has_failed, status_text, values_of
from flashtrain.report.table import Table, View, make_table
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.attention_benchmark.figures import family_path, heads_of
from flashtrain_recipes.benchmark_runner.measuring import Event, Row
from flashtrain_recipes.benchmark_runner.run import Benchmark, Run
from flashtrain_recipes.context_benchmark.contenders import ContextCase
from flashtrain_recipes.context_benchmark.launch import Job, RankFailed, joined, launched, started_by_torchrun

FIGURE, FAILURE = "efficiency.png", "failure.txt"
FEWEST_RANKS_ON_A_CPU = 4  # processes may be more than cores: slow, but what a test needs


class ContextBenchmark(Benchmark):
    """Every shape, mask, length and degree asked for. The ranks go through the cases and tell this process."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        self.job, self.too_many = job_of(settings, hardware)
        self.todo = self.job.cases()
        self.contenders, self.missing = self.job.contenders()

    def line(self) -> str:
        names = "; ".join(one.title for one in self.contenders) or "nothing"
        line = (
            f"attention over several devices: {len(self.todo)} cases, {self.asked.dtype}, up to {self.asked.rounds} "
            f"rounds{self.limit()}, on {self.job.size} x {self.hardware.name}: {names}"
        )
        return f"{line}\n{self.too_many}" if self.too_many else line

    def plan_line(self, case: ContextCase) -> str:
        kept = [one for one in self.contenders if one.applies(case)]
        refused = [f"; without {one.title} ({reason})" for one in kept if (reason := one.refuses(case))]
        return f"{case}{''.join(refused)}"

    def run(self, folder: Path, *, overrides: list[str], started: float) -> dict[str, Any]:
        """As Benchmark.run. Under torchrun every rank calls this, and the first one writes.

        Raises RankFailed, in one line, for a rank that failed.
        """
        if not self.contenders:
            reasons = "; ".join(f"{way}: {reason}" for way, reason in self.missing.items())
            raise UserError(
                f"benchmark.implementations names nothing that is here ({reasons}). Possible: flashtrain, "
                "plain-all-gather."
            )
        limit = self.asked.max_seconds
        self.job.until = None if limit is None else started + limit
        if started_by_torchrun() and os.environ["RANK"] != "0":
            with closing(joined(self.job)) as events:
                for _ in events:
                    pass
            return {}
        return super().run(folder, overrides=overrides, started=started)

    def events(self, run: Run) -> Generator[Event, None, None]:
        try:
            with closing(joined(self.job) if started_by_torchrun() else launched(self.job)) as events:
                yield from events
        except RankFailed as error:
            if error.trace:
                write_atomically(run.folder / FAILURE, error.trace)
            raise

    def told(self, rows: Sequence[Row]) -> str:
        return case_line(rows)

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        return {f"efficiency/{row['implementation']}": row["efficiency"] for row in rows if row.get("efficiency")}

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        return tables(rows)

    def figures(self, run: Run) -> Iterator[tuple[str, Path]]:
        """Efficiency against length, where there are several lengths of a shape."""
        if families(run.rows):
            yield "efficiency", efficiency_figure(run.rows, run.folder / FIGURE)

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        """The highest efficiency of all rows whose one-device time was measured."""
        found = [row["efficiency"] for row in rows if row.get("efficiency") and row["one_device"] == "measured"]
        return {"best_efficiency": max(found)} if found else {}


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


Rows = Sequence[Mapping[str, Any]]

_SHAPE = ("heads", "kv_heads", "head_dim", "dtype")
_TIMES = ("forward_ms", "backward_ms", "one_device_ms", "one_device", "efficiency", "tflops_per_device")
_REST = (
    "communication_ms", "communication_share", "sent_mib", "imbalance", "peak_memory_gib", "one_device_memory_gib",
    "error", "gradient_error", "error_ratio",
)  # fmt: skip


def tables(rows: Rows) -> list[Table]:
    """Efficiency by contender, the times, and the rest, for each shape by itself where there are several."""
    told = [key for key in _SHAPE if len(values_of(rows, key)) > 1]
    index = ["mask", *told, "seqlen", "degree"]
    found = []
    if values_of(rows, "efficiency"):
        title = "efficiency: time on one device / (devices x time on them)"
        found.append(View(index, "implementation", "efficiency").table(rows, title))
    for title, measures in (("times, forward and backward", _TIMES), ("what they come from", _REST)):
        shown = [key for key in measures if values_of(rows, key)]
        if shown:
            found.append(make_table(rows, [*index, "implementation", *shown], title))
    return found


def case_line(rows: Rows) -> str:
    """One case's rows in a line: milliseconds forward/backward and efficiency, or what happened."""
    parts = []
    for row in rows:
        if has_failed(row):
            parts.append(f"{row['implementation']} {status_text(row)}")
            continue
        share = "" if row.get("efficiency") is None else f" ({row['efficiency']:.1%})"
        parts.append(f"{row['implementation']} {row['forward_ms']:.3g}/{row['backward_ms']:.3g} ms{share}")
    return "; ".join(parts) or "nothing could be measured"


def families(rows: Rows) -> dict[str, list[Row]]:
    """The rows of each family by its name in words, with a key for each mask's efficiency: the figures' panels."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("seqlen") is not None:
            told = {**row, _panel(row["mask"]): row.get("efficiency")}
            found.setdefault(_name(row), []).append(told)
    return {
        name: kept
        for name, kept in found.items()
        if len(values_of(kept, "seqlen")) > 1 and values_of(kept, "efficiency")
    }


def efficiency_figure(rows: Rows, path: str | Path) -> Path:
    """Draw the first family at `path`, and the others beside it. UserError: no shape was measured at two lengths."""
    path = Path(path)
    found = families(rows)
    if not found:
        raise UserError("no shape was measured at two lengths: there is no curve to draw.")
    for number, (name, kept) in enumerate(found.items()):
        place, title = family_path(path, number, name), f"efficiency, {name}"
        panels = [_panel(mask) for mask in values_of(kept, "mask")]
        line_figure(kept, "seqlen", panels, ["implementation"], place, title=title, log_y=False, height=4.6)
    return path


def _panel(mask: str) -> str:
    return f"efficiency, {mask}"


def _name(row: Mapping[str, Any]) -> str:
    return f"{heads_of(row)}, {row['dtype']}, {row['degree']} devices"
