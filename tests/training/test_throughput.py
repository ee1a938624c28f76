"""The throughput callback's figures."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from tiny_training import CONTEXT, tiny_fit

from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.throughput import Throughput, _tokens_of


class Slow(pl.Callback):
    """Lets time pass in chosen parts of a run, in seconds."""

    def __init__(self, passing, step=0.0, validation=0.0, checkpoint=0.0):
        self.passing, self.step, self.validation, self.checkpoint = (
            passing,
            step,
            validation,
            checkpoint,
        )

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.passing(self.step)

    def on_validation_batch_start(self, *args, **kwargs):
        self.passing(self.validation)

    def on_save_checkpoint(self, *args, **kwargs):
        self.passing(self.checkpoint)


def fitted(folder, throughput, *callbacks, **options):
    return tiny_fit(folder, throughput, *callbacks, **options).trainer


def test_tokens_are_counted_over_the_accumulated_micro_batches(tmp_path):
    throughput = Throughput()
    fitted(tmp_path, throughput, max_steps=3, accumulate_grad_batches=2)
    assert throughput.step_tokens == [2 * 4 * (CONTEXT + 1)] * 3


def test_a_batch_that_knows_its_real_tokens_is_counted_by_them():
    assert _tokens_of({"tokens": torch.zeros(4, 8), "real_tokens": 29}) == 29
    assert _tokens_of({"tokens": torch.zeros(4, 8)}) == 32
    assert _tokens_of([]) == 0


def test_given_tokens_per_step_are_used_instead(tmp_path):
    throughput = Throughput(tokens_per_step=1000)
    fitted(tmp_path, throughput, max_steps=3)
    assert throughput.step_tokens == [1000] * 3


def test_validation_and_checkpoints_are_not_part_of_a_steps_time(tmp_path, passing):
    throughput = Throughput()
    pauses = Slow(passing, step=0.1, validation=0.3, checkpoint=0.3)
    options = {"limit_val_batches": 1, "val_check_interval": 2, "max_steps": 6}
    fitted(tmp_path, throughput, pauses, SaveLast(tmp_path, every_n_steps=3), **options)
    assert throughput.step_seconds == pytest.approx([0.1] * 6)


def test_everything_is_logged_at_the_log_interval(tmp_path):
    throughput = Throughput(flops_per_token=1e6, peak_flops=1e12)
    trainer = fitted(tmp_path, throughput, max_steps=4)
    logged = trainer.callback_metrics
    assert {"tokens_per_second", "step_seconds", "model_tflops", "mfu", "peak_memory_gib"} <= set(
        logged
    )
    assert float(logged["mfu"]) == pytest.approx(
        float(logged["tokens_per_second"]) * 1e6 / 1e12, rel=1e-5
    )
    assert float(logged["model_tflops"]) == pytest.approx(float(logged["mfu"]), rel=1e-5)


def test_flops_in_float8_are_measured_by_twice_the_peak(tmp_path):
    """A step of 3e5 FLOPs at the peak, and 7e5 at twice the peak, is as long as one of 6.5e5."""
    throughput = Throughput(flops_per_token=1e6, peak_flops=1e12, float8_flops=7e5)
    fitted(tmp_path, throughput, max_steps=2)
    summary = throughput.summary()
    assert summary["mfu"] == pytest.approx(summary["tokens_per_second"] * 6.5e5 / 1e12)
    assert summary["model_tflops"] == pytest.approx(summary["tokens_per_second"] * 1e6 / 1e12)


def test_flops_of_batches_that_differ_are_taken_whenever_they_are_logged(tmp_path):
    each = iter([1e6, 2e6, 4e6])
    throughput = Throughput(lambda: next(each), peak_flops=1e12)
    fitted(tmp_path, throughput, max_steps=2, log_every_n_steps=1)
    summary = throughput.summary()
    assert summary["mfu"] == pytest.approx(summary["tokens_per_second"] * 4e6 / 1e12)


def test_mfu_is_left_out_where_the_peak_is_unknown(tmp_path):
    throughput = Throughput(flops_per_token=1e6)
    trainer = fitted(tmp_path, throughput, max_steps=4)
    assert "mfu" not in trainer.callback_metrics
    assert throughput.summary()["mfu"] is None
    assert throughput.summary()["model_tflops"] > 0
    assert Throughput().summary()["step_seconds_median"] is None  # nothing was measured


def test_of_unknown_flops_nothing_is_logged(tmp_path):
    throughput = Throughput(lambda: math.nan, peak_flops=1e12)
    trainer = fitted(tmp_path, throughput, max_steps=4)
    assert not {"mfu", "model_tflops"} & trainer.callback_metrics.keys()
    assert throughput.summary()["mfu"] is None


def test_the_summary_takes_the_median_after_warm_up():
    throughput = Throughput(flops_per_token=2e6, peak_flops=1e9, warmup_steps=2)
    throughput.step_seconds = [9.0, 8.0, 1.0, 2.0, 2.0, 2.0, 30.0]
    throughput.step_tokens = [100] * 7
    summary = throughput.summary()
    assert summary["step_seconds_median"] == 2.0
    assert summary["tokens_per_second"] == 50.0
    assert summary["mfu"] == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "dropped"), [(500, 50), (60, 10), (12, 6), (2, 1), (1, 0)])
def test_warm_up_is_ten_steps_or_a_tenth_but_at_most_half(steps, dropped):
    assert Throughput()._warmup(steps) == dropped


def test_without_tokens_per_step_those_of_all_devices_count(passing):
    throughput = Throughput()
    two = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    throughput.on_fit_start(two, None)
    throughput.on_train_batch_start(two, None, {"tokens": torch.zeros(4, 8)}, 0)
    assert throughput._tokens == 2 * 4 * 8
