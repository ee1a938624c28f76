"""Learning rates by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from tiny_training import TinyData, TinyTask, tiny_trainer
from torch.optim.lr_scheduler import ConstantLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from flashtrain.command.compose import compose_settings
from flashtrain.registry import component
from flashtrain.tasks import optimization  # noqa: F401 - registers the schedules
from flashtrain.training.checkpoint_callbacks import SaveLast
from flashtrain.training.resumed_rates import RatesOfThisRun
from flashtrain.training.schedules import (
    SCHEDULES,
    constant_with_warmup,
    cosine_with_warmup,
    linear_with_warmup,
)


def rates(make, steps, *args, **options):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = make(optimizer, *args, **options)
    seen = []
    for _ in range(steps):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


def test_cosine_rises_to_the_peak_and_falls_to_the_minimum():
    seen = rates(cosine_with_warmup, 12, 4, 11, minimum_ratio=0.1)
    assert seen[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert seen[10] == pytest.approx(0.2)
    assert seen[11] == pytest.approx(0.2)  # past the end
    assert all(one > other for one, other in pairwise(seen[3:11]))
    # Symmetric about its middle.
    assert (seen[3] + seen[10]) / 2 == pytest.approx((seen[6] + seen[7]) / 2)


def test_linear_falls_in_equal_steps():
    assert rates(linear_with_warmup, 6, 2, 6, 0.1) == pytest.approx(
        [1.0, 2.0, 1.55, 1.1, 0.65, 0.2]
    )


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_fall_to_0_is_transformers_whose_first_rate_of_0_is_left_out(name, warmup):
    ours = rates(lambda optimizer: SCHEDULES[name](optimizer, warmup, 7, 0.0), 8)
    theirs = (
        get_linear_schedule_with_warmup if name == "linear" else get_cosine_schedule_with_warmup
    )
    skipped = min(warmup, 1)
    assert ours == pytest.approx(rates(theirs, 8 + skipped, warmup, 7 + skipped)[skipped:])
    assert min(ours[:7]) > 0 == ours[7]


class Rated(TinyTask):
    """Keeps each step's rate of a schedule that `build` makes for so many steps."""

    def __init__(self, build: Any, total_steps: int) -> None:
        super().__init__(total_steps)
        self.build, self.rates = build, []

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        return {"optimizer": optimizer,
                "lr_scheduler": {"scheduler": self.build(optimizer, self.total_steps)}
                | {"interval": "step"}}  # fmt: skip

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer, total: constant_with_warmup(optimizer, total // 2),
        lambda optimizer, total: StepLR(optimizer, total // 3),
        lambda optimizer, total: OneCycleLR(optimizer, 0.1, total),
        lambda optimizer, total: SequentialLR(  # warm-up, stable, decay
            optimizer,
            [
                LinearLR(optimizer, 0.1, total_iters=2),
                ConstantLR(optimizer, 1),
                LinearLR(optimizer, 1, 0.1, total - 9),
            ],
            [2, 9],
        ),
    ],
    ids=["constant", "steps", "one-cycle", "wsd"],
)
def test_a_run_that_goes_on_beyond_its_end_has_the_rates_of_its_new_length(tmp_path, build):
    def fit(length: int, folder: str, resume: str | None = None) -> list[float]:
        task = Rated(build, length)
        callbacks = (RatesOfThisRun(), SaveLast(tmp_path / folder))
        tiny_trainer(tmp_path, *callbacks, max_steps=length).fit(
            task, datamodule=TinyData(), ckpt_path=resume
        )
        return task.rates

    assert len(fit(10, "short")) == 10
    for length in (12, 15):
        continued = fit(length, "again", resume=str(tmp_path / "short" / "last.ckpt"))
        assert continued == fit(length, "whole")[10:]


def test_a_resumed_run_has_the_numbers_of_its_own_optimizer(tmp_path):
    class Decayed(Rated):
        numbers: ClassVar = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, **self.numbers)
            return [optimizer], [constant_with_warmup(optimizer, 1)]

    class Other(Decayed):
        numbers: ClassVar = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.5}

    for kind, steps, resume in ((Decayed, 2, None), (Other, 3, str(tmp_path / "last.ckpt"))):
        trainer = tiny_trainer(tmp_path, RatesOfThisRun(), SaveLast(tmp_path), max_steps=steps)
        trainer.fit(kind(lambda: None, 9), datamodule=TinyData(), ckpt_path=resume)
    group = trainer.optimizers[0].param_groups[0]
    assert {name: group[name] for name in Other.numbers} == Other.numbers


def test_constant_stays_at_the_peak():
    assert rates(constant_with_warmup, 5, 2) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0])


def test_a_run_of_one_step_works():
    assert rates(cosine_with_warmup, 2, 0, 1, minimum_ratio=0.5)[0] == pytest.approx(2.0)
    assert rates(linear_with_warmup, 1, 1, 1) == pytest.approx([2.0])


@pytest.mark.parametrize(("given", "steps"), [(0.1, 20), (0.03, 6), (0.001, 1), (7, 7), (0, 0)])
def test_a_warm_up_below_1_is_a_share_of_the_steps_as_in_transformers(given, steps) -> None:
    from transformers import TrainingArguments

    if given > 0.01 or not given:
        assert TrainingArguments(warmup_steps=given, report_to=[]).get_warmup_steps(200) == steps
    settings = compose_settings(
        ["recipe=gpt2", "schedule=cosine", f"schedule.warmup_steps={given}"]
    )
    make = component("schedule", "cosine")
    assert rates(lambda one: make(one, settings.schedule, 200), 200) == rates(
        lambda one: SCHEDULES["cosine"](one, steps, 200, 0.1), 200
    )
