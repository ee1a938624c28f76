"""flashtrain's BERT, trained as recipe=bert trains it, packed or padded."""

from __future__ import annotations

from typing import Any

import torch

from flashtrain.models.bert import Bert
from flashtrain.settings.settings import Settings
from flashtrain.tasks.masked_language.prepare import make_masked_task
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.bert_benchmark.batches import (
    FULL,
    PACKED,
    Sequences,
    masked_batches,
    packed_batches,
    random_batches,
)
from flashtrain_recipes.bert_benchmark.cases import BertCase
from flashtrain_recipes.harness.rows import Row
from flashtrain_recipes.step_benchmark.baselines.flashtrain import FLASHTRAIN
from flashtrain_recipes.step_benchmark.training_step import StepBaseline, TrainingStep, task_step


class FlashtrainBert(StepBaseline):
    """flashtrain's BERT as a baseline.

    Args:
        name: the baseline's name in benchmark.implementations.
        batching: PACKED, or RANDOM for padded batches. Where every sequence fills its row, both
            give the same batches.
    """

    def __init__(
        self, name: str, batching: str, *, settings: Settings, hardware: Hardware, compiled: bool
    ) -> None:
        self.name, self.batching, self.compiled = name, batching, compiled
        self.title = f"{FLASHTRAIN}, {'packed' if batching == PACKED else 'padded'}"
        self.settings, self.hardware = settings, hardware

    def columns(self, case: BertCase | None) -> Row:
        full = case is not None and not case.unit and self.batching != PACKED
        return {**super().columns(case), "padding": FULL if full else self.batching}

    def build(self, case: BertCase, device: torch.device) -> TrainingStep:
        settings, hardware = case.settings_of(self.settings), case.hardware_of(self.hardware)
        settings.trainer.compile = self.compiled
        torch.manual_seed(0)
        with torch.device(device):
            model = Bert(case.config(), hardware.attention)
        task = make_masked_task(settings, hardware, model.train(), {})
        return task_step(task, model, task.batch_loss, case, device)

    def batches(
        self,
        case: BertCase,
        drawn: Sequences,  # type: ignore[override]
        device: torch.device,
    ) -> list[tuple[Any, ...]]:
        budget = None
        if self.batching == PACKED:
            members, budget = packed_batches(drawn.lengths, case.batch * case.context)
        else:
            members = random_batches(drawn.lengths, case.batch)
        return [(one,) for one in masked_batches(drawn, members, device, budget=budget)]
