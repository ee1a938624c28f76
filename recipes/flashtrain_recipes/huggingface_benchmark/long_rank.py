"""A process of recipe=hf-long: one rank, which trains a case with Lightning's Trainer and
sends the measurements."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from flashtrain.folders.run_folder import read_settings
from flashtrain.models.activation_checkpointing import PINNED_BYTES
from flashtrain.run.fitting import strategy_for
from flashtrain.tasks.batching import Batching, choose_batching
from flashtrain.tasks.language.prepare import language_model
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase

# Under adapters the first layer's input needs no gradient, so that it has a graph of its own.
_WARM_LAYERS = 2


def measure_steps(
    rank: int,
    send: Callable[[Row], None],
    model: str,
    context: int,
    hardware: Hardware,
    folder: Path,
    port: int,
) -> None:
    """Train a case for benchmark.steps steps on this rank, and send the columns of its
    row from the first rank.

    The columns are sent as soon as they are known; the process that receives them then ends this
    one.

    Args:
        send: passes a row to the process that started this one.
        model: a name of conf/decoder_shapes.yaml, with the ending LORA for adapters.
        folder: the run's folder, whose settings are read.
        port: a free TCP port of this machine, where the ranks meet.
    """
    settings = read_settings(folder)
    case = HuggingFaceCase(model, context, "fp32", settings)
    if settings.trainer.devices > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.trainer.devices)
        )
    torch.set_float32_matmul_precision("high")
    pl.seed_everything(settings.seed, verbose=False)
    batching = choose_batching(case.settings(), hardware, case.decoder(hardware))
    began = time.perf_counter()
    compiling = warm_up(case, hardware, folder, batching)
    if hardware.kind == "cuda":
        torch.cuda.empty_cache()
        host = 0 if batching.estimate is None else batching.estimate.host
        # Page-locked memory takes a second for a few GiB, once a run.
        [
            torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(host // PINNED_BYTES)
        ]
    columns = {
        "compile_seconds": round(compiling, 1),
        "set_up_seconds": round(time.perf_counter() - began, 1),
    }
    rate = settings.trainer.devices * (hardware.peak_flops or 0.0) / case.flops_per_token()
    # Of a step.
    tokens = case.context * (1 if settings.shares_sequences else settings.trainer.devices)

    def done(seconds: list[float], peak: float | None) -> None:
        median = statistics.median(seconds[1:] or seconds)
        send({
            **columns,
            "step_seconds": round(median, 3),
            "tokens_per_second": round(tokens / median, 1),
            "mfu": None if not rate else round(tokens / median / rate, 4),
            "peak_memory_gib": None if peak is None else round(peak, 3),
            "steps": len(seconds),
        })  # fmt: skip

    _fit(case, hardware, folder, settings.benchmark.steps, batching, _Reports(done, states=True))


class _Reports(pl.Callback):
    """Calls done(seconds of each step, peak memory in GiB) on the first rank when training ends,
    with the largest values of all ranks.

    It does so before Lightning moves the model, tens of GiB, to host memory.

    Args:
        states: make the optimizer's states before the first step (make_states).
    """

    def __init__(
        self, done: Callable[[list[float], float | None], None], *, states: bool = False
    ) -> None:
        self.throughput = Throughput(warmup_steps=0)
        self.done, self.states = done, states

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers if self.states else []:
            make_states(optimizer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.throughput.on_train_end(trainer, pl_module)
        peak, device = self.throughput.peak_memory_gib(), trainer.strategy.root_device
        found = torch.tensor([*self.throughput.step_seconds, peak or 0.0], device=device)
        if trainer.world_size > 1:
            found = trainer.strategy.reduce(found, reduce_op="max")
        *seconds, largest = found.tolist()
        if trainer.is_global_zero:
            self.done(seconds, None if peak is None or device.type == "cpu" else largest)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's states (such as Adam's moments), by one step with gradients of 0.

    Without them the first step's peak memory would be below that of every later step.
    """
    for parameter in (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ):
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def warm_up(case: HuggingFaceCase, hardware: Hardware, folder: Path, batching: Batching) -> float:
    """Train a model of a few layers for one step, which compiles the kernels, and return
    the seconds that it took."""
    took: list[float] = []
    _fit(
        replace(case, layers=_WARM_LAYERS),
        hardware,
        folder,
        1,
        batching,
        _Reports(lambda each, _: took.extend(each)),
    )
    gc.collect()
    return sum(took)


def _fit(
    case: HuggingFaceCase,
    hardware: Hardware,
    folder: Path,
    steps: int,
    batching: Batching,
    reports: _Reports,
) -> None:
    settings, model = case.settings(), case.decoder(hardware)
    model.save_memory(batching.savings)
    tokens, labels = case.draw(torch.device("cpu"), settings.seed)
    accelerator = "gpu" if hardware.kind == "cuda" else "cpu"
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=settings.trainer.devices,
        strategy=strategy_for(settings, folder),
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
    trainer.fit(language_model(settings, hardware, model, {}), DataLoader(batches, batch_size=None))
