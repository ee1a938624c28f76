"""What a step returns is weighted once, whatever it logged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashtrain.distributed.context.layouts import contiguous
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.distributed.context.weighted_means import weighted_output
from flashtrain.models.sharded_sequence import mean_over_context, use_sharded_sequence
from flashtrain_kernels import masks

WEIGHT = 0.5  # of a rank that holds 1 of 4 labels, where two share them


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("logs", ["nothing", "the mean", "the mean of a loss without its graph"])
@pytest.mark.parametrize("returns_the_mean", [False, True])
def test_a_steps_loss_is_weighted_once(logs: str, returns_the_mean: bool, named: bool) -> None:
    group: Any = SimpleNamespace(size=2, rank=0, data_group=None)
    sequence = ContextSequence(contiguous(masks.causal(8), 2), group, counted=(1, 4))
    loss = torch.tensor(3.0, requires_grad=True)
    with use_sharded_sequence(sequence):
        if logs != "nothing":
            mean_over_context(loss if logs == "the mean" else loss.detach())
        output = mean_over_context(loss) if returns_the_mean else loss
        weighted = weighted_output(sequence, {"loss": output} if named else output)
    assert float(weighted["loss"] if named else weighted) == 3.0 * WEIGHT
