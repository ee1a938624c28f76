"""Learning rates by step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.training.steps import constant_with_warmup, cosine_with_warmup, linear_with_warmup, make_schedule


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
    assert (seen[3] + seen[10]) / 2 == pytest.approx((seen[6] + seen[7]) / 2)  # symmetric about its middle


def test_linear_falls_in_equal_steps():
    assert rates(linear_with_warmup, 6, 2, 6) == pytest.approx([1.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_constant_stays_at_the_peak():
    assert rates(constant_with_warmup, 5, 2) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0])


def test_without_warm_up_the_first_step_has_the_peak():
    assert rates(cosine_with_warmup, 1, 0, 10) == pytest.approx([2.0])


def test_a_run_of_one_step_works():
    assert rates(cosine_with_warmup, 2, 0, 1, minimum_ratio=0.5)[0] == pytest.approx(2.0)
    assert rates(linear_with_warmup, 1, 1, 1) == pytest.approx([2.0])


def test_a_schedule_is_made_by_its_name():
    assert rates(lambda optimizer: make_schedule("linear", optimizer, 0, 3, 0.0), 3) == pytest.approx([2.0, 1.0, 0.0])
    with pytest.raises(UserError, match="Did you mean 'cosine'"):
        make_schedule("cosin", None, 0, 1, 0.0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((11, 10), "warmup_steps=11 must not exceed the 10 steps"),
        ((-1, 10), "warmup_steps must be 0 or more"),
        ((0, 0), "total_steps must be 1 or more"),
        ((0, 10, 1.5), "minimum_ratio must lie between"),
    ],
)
def test_counts_that_do_not_fit_are_one_line(arguments, line):
    for make in (cosine_with_warmup, linear_with_warmup):
        with pytest.raises(UserError, match=line):
            rates(make, 1, *arguments)
