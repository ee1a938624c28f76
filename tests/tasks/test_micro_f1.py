"""Micro-averaged F1, against its definition."""

from __future__ import annotations

import pytest
import torch

from flashtrain.tasks.fine_tuning.task import MicroF1


def test_it_counts_over_all_samples_and_batches_together():
    metric = MicroF1()
    metric.update(torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([[1, 1, 0]]))  # one right, one missed, one wrong
    metric.update(torch.tensor([[-3.0, -1.0, 0.5], [1.0, 1.0, 1.0]]), torch.tensor([[0, 0, 1], [-100, -100, -100]]))
    assert metric.compute() == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    metric.reset()
    metric.update(torch.tensor([[-1.0]]), torch.tensor([[0]]))  # neither labels nor predictions
    assert metric.compute() == 0
