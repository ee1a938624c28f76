"""recipe=hf-long: steps of transformers' decoders at long contexts, by the strategy, savings and Trainer of recipe=hf.

Each case is measured in processes of its own, a rank each: what runs out of memory, hangs or takes too long ends with
them, and is a row. Two layers of the same kind make a step first, so that what is measured holds no compilation.

    python -m flashtrain_recipes.huggingface_benchmark.long_steps FOLDER CASE      # in those processes
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from flashtrain.errors import UserError
from flashtrain.files.disk import write_atomically
from flashtrain.folders.run_folder import OUT_OF_MEMORY, read_settings
from flashtrain.models.memory_savings import HOST_PIECE
from flashtrain.models.trainable import Trainable
from flashtrain.report.rows import values_of
from flashtrain.report.table import Table, make_table
from flashtrain.run.fitting import strategy_for
from flashtrain.settings.settings import Settings
from flashtrain.tasks.batching import Batching, choose_batching, memory_columns, room
from flashtrain.tasks.components import make_model
from flashtrain.tasks.context_run import check_model, context_columns
from flashtrain.tasks.language.prepare import make_task
from flashtrain.training.hardware import Hardware, detect_hardware
from flashtrain.training.memory import GIB
from flashtrain.training.memory_choice import Room
from flashtrain.training.out_of_memory import is_out_of_memory
from flashtrain.training.throughput import Throughput
from flashtrain_recipes.benchmark_runner.measuring import Effort, Row, first_line
from flashtrain_recipes.benchmark_runner.run import Benchmark, Run
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.measure import FAILED, NO_TIME

FLASHTRAIN, PLAN = "flashtrain", "plan of memory=auto"
FIGURE = "memory.png"
_WARM_LAYERS = 2  # under adapters the first layer's input needs no gradient, so that it has a graph of its own
_ENDING = 10.0  # seconds in which ranks end by themselves once a row is there
_MULTIPLE = 4096  # tokens: of the contexts that are told as the largest
_MOST = 4096  # such multiples: the search for the largest context stays below
_COLUMNS = (
    "model", "context", "devices", "implementation", "step_seconds", "tokens_per_second", "mfu", "peak_memory_gib",
    "memory_estimate_gib", "host_estimate_gib", "memory", "limited_by", "steps", "compile_seconds", "status",
)  # fmt: skip


class LongSteps(Benchmark):
    """Every model and context asked for, on trainer.devices devices that share a sequence where context_parallel says.

    UserError: more devices than there are.
    """

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        super().__init__(settings, hardware)
        if hardware.kind == "cuda" and settings.trainer.devices > hardware.count:
            raise UserError(f"trainer.devices={settings.trainer.devices}, but this machine has {hardware.count}.")
        precision = settings.hardware.precision or hardware.precision
        attention = "flash" if settings.shares_sequences else hardware.attention
        self.settled = replace(hardware, precision=precision, attention=attention)
        self.todo = [
            HuggingFaceCase(model, context, "fp32", settings)
            for model in self.asked.models
            for context in sorted(self.asked.contexts)
        ]
        self._full: dict[str, int] = {}  # the context at which a model ran out of memory

    def line(self) -> str:
        devices = f"{self.settings.trainer.devices} x {self.hardware.name}"
        return f"long steps: {len(self.todo)} cases of {self.asked.steps} steps{self.limit()}, on {devices}"

    def case_line(self, case: HuggingFaceCase) -> str:
        return f"{case.model} S={case.context:,}"

    def plan_line(self, case: HuggingFaceCase) -> str:
        return f"{self.case_line(case)}: {_words(self.columns(case))}"

    def plan_lines(self) -> list[str]:
        largest = [f"{row['model']} S={row['context']:,} at most by memory=auto: {_words(row)}" for row in self.plans()]
        return [*super().plan_lines(), *largest]

    def measure(self, number: int, effort: Effort, run: Run) -> list[Row]:
        case = self.todo[number]
        columns = self.columns(case)
        if "error" in columns:  # more is needed than there is, whatever is saved
            found: Row = {}
        elif case.model in self._full:
            why = f"not tried: a context of {self._full[case.model]:,} ran out of memory already"
            found = {"status": OUT_OF_MEMORY, "error": why}
        else:
            found = _in_processes(run.folder.resolve(), number, run.seconds_left())
        row = {**columns, **found}
        if row.get("status") == OUT_OF_MEMORY:
            self._full.setdefault(case.model, case.context)
        if "error" in row:
            run.note(self.case_line(case), FLASHTRAIN, f"{row['status']}: {row['error']}")
        return [row]

    def not_begun(self, case: HuggingFaceCase) -> list[Row]:
        return [{"status": NO_TIME, **self.columns(case)}]

    def completed(self, run: Run) -> list[Row]:
        return [*run.rows, *self.plans()]

    def told(self, rows: Sequence[Row]) -> str:
        row = rows[0]
        if row["step_seconds"] is None:
            return str(row["status"])
        return f"{row['step_seconds']:,.2f} s a step, {row['tokens_per_second']:,.0f} tokens/s, mfu {row['mfu']}"

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        columns = [key for key in _COLUMNS if values_of(rows, key)]
        return [make_table(rows, columns, "long steps of transformers' decoders")]

    def figures(self, run: Run) -> Iterator[tuple[str, Path]]:
        """Peak memory against context."""
        from flashtrain.report.figures import line_figure  # matplotlib, for which a case's processes need not wait

        rows = [row for row in run.rows if row.get("peak_memory_gib")]
        group = ["model", "devices", "implementation", *(["memory"] if len(values_of(rows, "memory")) > 1 else [])]
        if len(values_of(rows, "context")) > 1:
            yield "memory", line_figure(rows, "context", "peak_memory_gib", group, run.folder / FIGURE)

    def best(self, rows: Sequence[Row]) -> dict[str, float]:
        return {
            f"step_seconds_{row['model']}_{row['context']}": row["step_seconds"] for row in rows if row["step_seconds"]
        }

    def columns(self, case: HuggingFaceCase) -> Row:
        """What is known of a case beforehand."""
        settings, model = case.settings(), _model(case, self.settled)
        columns = {
            "implementation": FLASHTRAIN, "model": case.model, "context": case.context, "batch": 1,
            "devices": settings.trainer.devices, "precision": self.settled.precision,
            **context_columns(settings, self.settled, model, 1),
            **dict.fromkeys(("memory", "memory_estimate_gib", "host_estimate_gib", "peak_memory_gib")),
            **dict.fromkeys(("step_seconds", "tokens_per_second", "mfu", "compile_seconds")),
        }  # fmt: skip
        try:
            return {**columns, **_planned(choose_batching(settings, self.settled, model))}
        except UserError as error:
            return {**columns, "status": OUT_OF_MEMORY, "error": str(error)}

    def plans(self) -> list[Row]:
        """For each model the largest context that memory=auto takes, by its estimate; nothing of them is measured.

        limited_by: what a longer one would not fit, the device's memory or the host's; None: no limit below _MOST.
        """
        return [row for model in self.asked.models if (row := self._largest(model))]

    def _largest(self, name: str) -> Row | None:
        case = HuggingFaceCase(name, min(self.asked.contexts), "fp32", self.settings)
        model = _model(case, self.settled)

        def plan(count: int) -> Batching:
            settings = replace(case, context=count * _MULTIPLE).settings()
            settings.memory = type(settings.memory)()
            return choose_batching(settings, self.settled, model)

        low, high = 0, _MOST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if plan(middle).fits else (low, middle)
        if not low:
            return None
        device = Room(room(self.settings, self.settled).device)  # with a host that holds anything
        by_host = any(device.holds(option.estimate) for option in plan(high).options)
        return {
            "implementation": PLAN, "model": name, "context": low * _MULTIPLE, "batch": 1,
            "devices": self.settings.trainer.devices, "precision": self.settled.precision, **_planned(plan(low)),
            "limited_by": None if high == _MOST else "host" if by_host else "device",
            "peak_memory_gib": None, "step_seconds": None,
        }  # fmt: skip


def _planned(batching: Batching) -> Row:
    """The savings that are taken, and what is estimated of them."""
    needed = batching.estimate
    return {**memory_columns(batching), "host_estimate_gib": None if needed is None else round(needed.host / GIB, 2)}


def _words(row: Row) -> str:
    """What is planned of a case, as mode=plan lists it."""
    keys = ("memory", "memory_estimate_gib", "host_estimate_gib", "limited_by", "error")
    return ", ".join(f"{key} {row[key]}" for key in keys if row.get(key) is not None)


def _model(case: HuggingFaceCase, hardware: Hardware) -> Trainable:
    settings = case.settings()
    model = make_model(settings, vocab_size=0, attention=hardware.attention)
    check_model(settings, model)
    model.keep_in(hardware.precision)
    return model


# --- the processes of a case ------------------------------------------------------------------------------------------


def _row_file(folder: Path, number: int) -> Path:
    return folder / f"case-{number}.json"


def _in_processes(folder: Path, number: int, seconds: float | None) -> Row:
    """What the ranks of a case found; a row of its status where they found nothing, or not in time."""
    file, until = _row_file(folder, number), None if seconds is None else time.monotonic() + seconds
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", __spec__.name, str(folder), str(number)]
    with (folder / f"case-{number}.txt").open("w", encoding="utf-8") as output:
        found_here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=found_here
        )
    try:
        while process.poll() is None and not file.exists() and (until is None or time.monotonic() < until):
            time.sleep(0.1)
        late = process.poll() is None and not file.exists()
        if not late:
            _wait(process)
    finally:
        _end(process)
    if file.exists():
        found: Row = json.loads(file.read_text(encoding="utf-8"))
        return found
    why = "benchmark.max_seconds were over" if late else f"ended with status {process.returncode}: see {output.name}"
    return {"status": NO_TIME if late else FAILED, "error": why}


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and the ranks that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Reports(pl.Callback):
    """At the end of a fit: seconds of its steps and GiB of its peak, the largest of all ranks'."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self.found: tuple[list[float], float | None] = [], None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.throughput.on_train_end(trainer, pl_module)
        peak = self.throughput.peak_memory_gib()
        told = torch.tensor([*self.throughput.step_seconds, peak or 0.0], device=trainer.strategy.root_device)
        if trainer.world_size > 1:
            told = trainer.strategy.reduce(told, reduce_op="max")
        *seconds, largest = told.tolist()
        self.found = seconds, None if peak is None or trainer.strategy.root_device.type == "cpu" else largest


class _Ends(_Reports):
    """Then writes the row and ends the process, before Lightning moves tens of GiB to host memory."""

    def __init__(self, throughput: Throughput, columns: Row, folder: Path, number: int, rate: float) -> None:
        super().__init__(throughput)
        self.columns, self.folder, self.number, self.rate = columns, folder, number, rate

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            _make_states(optimizer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        seconds, peak = self.found
        median = statistics.median(seconds[1:] or seconds)
        row = {
            **self.columns,
            "step_seconds": round(median, 3),
            "tokens_per_second": round(self.columns["context"] / median, 1),
            "mfu": None if not self.rate else round(self.columns["context"] / median / self.rate, 4),
            "peak_memory_gib": None if peak is None else round(peak, 3),
            "steps": len(seconds),
        }
        if trainer.is_global_zero:
            write_atomically(_row_file(self.folder, self.number), json.dumps(row))
        trainer.strategy.barrier()
        sys.stdout.flush()
        os._exit(0)


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """The optimiser's states, by a step that changes no weight. A first step makes them after its backward, so that the
    peak of one step alone would be without them; every later step has them."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    _set_rates(optimizer, [0.0] * len(rates))
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    _set_rates(optimizer, rates)


def _set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):  # torchao's, which refuses another object
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _fit(
    case: HuggingFaceCase, hardware: Hardware, folder: Path, steps: int, batching: Batching, reports: _Reports
) -> None:
    settings, model = case.settings(), _model(case, hardware)
    model.save_memory(batching.savings)
    tokens, labels = case.draw(1, torch.device("cpu"), settings.seed)
    on_gpu = hardware.kind == "cuda"
    accelerator = "gpu" if on_gpu else "cpu"
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=settings.trainer.devices,
        strategy=strategy_for(settings, accelerator, folder),
        precision=hardware.precision,  # type: ignore[arg-type]
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[reports.throughput, reports],
    )
    batches: Any = [{"tokens": tokens, "labels": labels}] * steps
    trainer.fit(make_task(settings, hardware, model, {}), DataLoader(batches, batch_size=None))


def _warm_up(case: HuggingFaceCase, hardware: Hardware, folder: Path, batching: Batching) -> float:
    """Seconds of a step of a few layers, which compiles what the case needs. Nothing of it stays."""
    reports = _Reports(Throughput(warmup_steps=0))
    _fit(replace(case, layers=_WARM_LAYERS), hardware, folder, 1, batching, reports)
    (seconds,), _ = reports.found
    del reports  # Lightning gave it the module's `log`, and with it the module, its optimiser and their memory
    gc.collect()
    return seconds


def _measure(folder: Path, number: int) -> None:
    """Measure one case, as a rank of it; writes its row, or what went wrong."""
    settings = read_settings(folder)
    job = LongSteps(settings, detect_hardware(settings.hardware.accelerator))
    case, hardware = job.todo[number], job.settled
    torch.set_float32_matmul_precision("high")
    pl.seed_everything(settings.seed, verbose=False)
    columns, flops, peak = job.columns(case), case.flops_per_token(), hardware.peak_flops
    batching = choose_batching(case.settings(), hardware, _model(case, hardware))
    began = time.perf_counter()
    columns["compile_seconds"] = round(_warm_up(case, hardware, folder, batching), 1)
    if hardware.kind == "cuda":
        torch.cuda.empty_cache()
        host = 0 if batching.estimate is None else batching.estimate.host
        # Page-locked memory takes a second for a few GiB, once a run.
        [torch.empty(HOST_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(host // HOST_PIECE)]
    columns["set_up_seconds"] = round(time.perf_counter() - began, 1)
    rate = 0.0 if peak is None else settings.trainer.devices * peak / flops
    ends = _Ends(Throughput(warmup_steps=0), columns, folder, number, rate)
    _fit(case, hardware, folder, settings.benchmark.steps, batching, ends)


def main(arguments: Sequence[str]) -> None:
    """As a rank: FOLDER CASE."""
    folder, number = Path(arguments[0]), int(arguments[1])
    try:
        _measure(folder, number)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases go on
        status = OUT_OF_MEMORY if is_out_of_memory(error) or "OutOfMemory" in repr(error) else FAILED
        file = _row_file(folder, number)
        if not file.exists():
            write_atomically(file, json.dumps({"status": status, "error": first_line(error)}))
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
