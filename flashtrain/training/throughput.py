"""Measure a run's speed and peak memory, with a callback for any Lightning program."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from flashtrain.training.float8 import RATE
from flashtrain.training.steps import OptimizerStepCounter, log_interval

GIB = 2**30


# Lightning 2.6.6's ThroughputMonitor needs a function that counts each batch's samples, waits for
# the device at each step, and has no peak for an H200 under its usual name.
class Throughput(pl.Callback):
    """Logs tokens_per_second, step_seconds, model_tflops, mfu and peak_memory_gib at the
    trainer's log interval.

    A step's time runs from the end of one optimizer step to the end of the next, with data loading
    and logging, without validation, checkpoints and sanity checks. On a GPU it comes from CUDA
    events that are read after they have passed, so that measuring never waits for the device.

    tokens_per_second is of all devices together; model_tflops (10^12 FLOP/s), mfu (0 to 1) and
    peak_memory_gib are of one device. peak_memory_gib is torch's allocated peak on a GPU, the
    process's peak resident size on a CPU.

    Args:
        flops_per_token: model FLOPs of one token's forward and backward (a model's
            `flops_per_token()`), counted from the architecture: torch's counter sees nothing inside
            a custom op. If it is a function, it is called whenever values are logged, for batches
            that differ. None, or nan: no model_tflops and no mfu.
        tokens_per_step: tokens of one optimizer step over all devices. None: count each
            micro-batch's "real_tokens" (without padding), or else its "tokens", times the devices.
            Sequences that devices share (ContextParallelStrategy) are counted once.
        peak_flops: dense peak of one device in FLOP/s (`Hardware.peak_flops`); None: no mfu.
        float8_flops: those of flops_per_token that are computed in float8. Its peak is twice
            bf16's, so mfu counts each as half: linear layers by float8's peak, the rest by bf16's.
        warmup_steps: number of first steps (compilation, allocator, caches) that `summary()` leaves
            out; None: a tenth of all steps, but at least 10, and never more than half of all.
    """

    def __init__(
        self,
        flops_per_token: float | Callable[[], float] | None = None,
        tokens_per_step: int | None = None,
        peak_flops: float | None = None,
        warmup_steps: int | None = None,
        float8_flops: float = 0.0,
    ) -> None:
        super().__init__()
        self.flops_per_token = flops_per_token
        self.tokens_per_step = tokens_per_step
        self.peak_flops = peak_flops
        self.warmup_steps = warmup_steps
        self.float8_flops = float8_flops
        self.step_seconds: list[float] = []  # of every step measured, in order
        self.step_tokens: list[int] = []  # tokens of the same steps, all devices together
        self._steps = OptimizerStepCounter()
        self._clock = _Clock(torch.device("cpu"))
        self._open = False  # the current step's begin is marked
        self._tokens = 0
        self._micro_batches = 0  # seen of the current step
        self._logged = 0
        self._devices = 1
        self._device = torch.device("cpu")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._devices = trainer.world_size
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.start(trainer)
        self._clock = _Clock(self._device)
        self._open = False
        self._tokens = self._micro_batches = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # After an interruption (or at the very start) a step is measured from its own first batch.
        if not self._open and self._micro_batches == 0:
            self._clock.begin()
            self._open = True
        self._micro_batches += 1
        if self.tokens_per_step is None:
            # If devices share a sequence, the strategy knows its length; the parts
            # may differ in length.
            shared = getattr(trainer.strategy, "tokens_of_batch", None)
            self._tokens += _tokens_of(batch) * self._devices if shared is None else shared
        else:
            self._tokens = self.tokens_per_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        if not self._steps.ended(trainer):
            return
        if self._open:
            self._clock.end(self._tokens)
        self._tokens = self._micro_batches = 0
        if not self._open:
            # This step was interrupted (a checkpoint inside it): it is dropped, and
            # the next begins here.
            self._clock.begin()
            self._open = True
        self._collect(wait=False)
        if trainer.global_step % log_interval(trainer) == 0:
            self._log(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open = False

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        self._open = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._collect(wait=True)

    def summary(self) -> dict[str, float | None]:
        """Summarize the run.

        Returns:
            tokens_per_second (of the median step after warm-up, all devices), step_seconds_median,
            model_tflops and mfu (one device) and peak_memory_gib. Unknown values are None.
        """
        measured = slice(self._warmup(len(self.step_seconds)), None)
        seconds, tokens = self.step_seconds[measured], self.step_tokens[measured]
        median = statistics.median(seconds) if seconds else None
        return {
            **self._rates(statistics.median(tokens) if tokens else 0, median or 0),
            "step_seconds_median": median,
            "peak_memory_gib": self.peak_memory_gib(),
        }

    def columns(self) -> dict[str, float | None]:
        """Return the part of `summary()` that goes into a run's summary row,
        under the row's keys."""
        row = self.summary()
        row["step_seconds"] = row["step_seconds_median"]
        return {
            name: row[name]
            for name in ("tokens_per_second", "step_seconds", "mfu", "peak_memory_gib")
        }

    def peak_memory_gib(self) -> float | None:
        """Return the peak memory in GiB: allocated on the GPU, or resident in this
        process; None if unknown."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / GIB
        return _peak_resident_gib()

    def _warmup(self, steps: int) -> int:
        wanted = max(10, steps // 10) if self.warmup_steps is None else self.warmup_steps
        return min(wanted, steps // 2)

    def _collect(self, wait: bool) -> None:
        for seconds, tokens in self._clock.finished(wait):
            self.step_seconds.append(seconds)
            self.step_tokens.append(tokens)

    def _log(self, pl_module: pl.LightningModule) -> None:
        seconds, tokens = self.step_seconds[self._logged :], self.step_tokens[self._logged :]
        self._logged = len(self.step_seconds)
        if not seconds:
            return
        values = {
            **self._rates(sum(tokens), sum(seconds)),
            "step_seconds": sum(seconds) / len(seconds),
            "peak_memory_gib": self.peak_memory_gib(),
        }
        known = {name: value for name, value in values.items() if value is not None}
        pl_module.log_dict(known, on_step=True, on_epoch=False, batch_size=1)

    def _rates(self, tokens: float, seconds: float) -> dict[str, float | None]:
        tokens_per_second = tokens / seconds if tokens and seconds > 0 else None
        flops = mfu = None
        if tokens_per_second is not None and self.flops_per_token is not None:
            each = (
                self.flops_per_token() if callable(self.flops_per_token) else self.flops_per_token
            )
            rate = tokens_per_second / self._devices
            flops = None if math.isnan(each) else rate * each
            if flops is not None and self.peak_flops is not None:
                mfu = (flops - rate * self.float8_flops * (1 - 1 / RATE)) / self.peak_flops
        return {
            "tokens_per_second": tokens_per_second,
            "model_tflops": None if flops is None else flops / 1e12,
            "mfu": mfu,
        }


class _HostEvent:
    """A torch.cuda.Event of the host's clock, which is exact on a CPU: an operation has ended when
    it returns."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return 1000.0 * (end.seconds - self.seconds)


class _Clock:
    """Measures step times by events, on a GPU those of the training stream, which are read when the
    device has passed them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Any = None
        self._pending: deque[tuple[Any, Any, int]] = deque()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return _HostEvent()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        self._begun = self._mark()

    def end(self, tokens: int) -> None:
        now = self._mark()
        if self._begun is not None:
            self._pending.append((self._begun, now, tokens))
        self._begun = now

    def finished(self, wait: bool) -> list[tuple[float, int]]:
        done = []
        while self._pending:
            begun, ended, tokens = self._pending[0]
            if not ended.query():
                if not wait:
                    break
                ended.synchronize()
            done.append((begun.elapsed_time(ended) / 1000.0, tokens))
            self._pending.popleft()
        return done


def _tokens_of(batch: Any) -> int:
    """Return the tokens of one micro-batch: the value of "real_tokens", else the number of elements
    of "tokens"; 0 if the batch has neither."""
    real = batch.get("real_tokens") if isinstance(batch, dict) else None
    if isinstance(real, int):
        return real
    tokens = batch.get("tokens") if isinstance(batch, dict) else getattr(batch, "tokens", None)
    return tokens.numel() if isinstance(tokens, torch.Tensor) else 0


def _peak_resident_gib() -> float | None:
    try:
        import resource
    except ImportError:  # Windows has no such call
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
