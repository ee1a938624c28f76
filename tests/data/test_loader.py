"""The training loader: its place in the run, with and without a Trainer."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from lightning_fabric.utilities.types import _Stateful
from torch.utils.data import DistributedSampler

from flashtrain.data.loader import ResumableLoader, StepSampler
from flashtrain.data.packing import PackedSamples, Spans


@pytest.fixture
def make():
    spans = Spans(np.array([0]), np.array([321]))

    def make(*, workers=0, seed=0, context=4, batch_size=2, accumulate=2):
        samples = PackedSamples(np.arange(321, dtype=np.uint16), spans, context)
        sampler = StepSampler(len(samples), batch_size=batch_size, total_steps=5, accumulate=accumulate, seed=seed)
        return ResumableLoader(samples, sampler, num_workers=workers)

    return make


def firsts(batches):
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def test_it_is_what_lightning_takes_for_resumable_and_leaves_alone(make):
    loader = make()
    assert isinstance(loader, _Stateful)
    assert isinstance(loader.sampler, DistributedSampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_state_saved_midway_gives_exactly_the_rest(make, workers):
    whole = firsts(make())
    loader = make(workers=workers)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    assert state["step"] == 3
    assert state["samples_read"] == 12
    resumed = make(workers=workers)
    resumed.load_state_dict(state)
    assert firsts(resumed) == whole[6:]
    assert len(resumed) == len(whole) == 10


def test_a_step_begun_but_not_done_is_read_again(make):
    whole = firsts(make())
    loader = make()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert firsts(resumed) == whole[4:]


def test_a_loop_that_only_looked_starts_where_it_was_and_a_finished_pass_is_followed_by_the_next(make):
    loader = make()
    first_look = next(iter(loader))["tokens"]
    first_pass = firsts(loader)
    assert first_look[:, 0].tolist() == first_pass[0]
    second_pass = firsts(loader)
    assert len(second_pass) == 10
    # 80 samples an epoch, 20 a pass: nothing is read twice before the fifth.
    assert not set(chain(*first_pass)) & set(chain(*second_pass))


def test_another_batch_size_goes_on_with_the_next_sample(make):
    stream = list(chain(*firsts(make())))
    loader = make()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    resumed = make(batch_size=3, accumulate=1)
    resumed.load_state_dict(loader.state_dict())
    assert list(chain(*firsts(resumed))) == stream[8:17]
    assert resumed.state_dict()["samples_read"] == 17


def test_a_batch_size_changed_before_the_last_resume_is_remembered(make):
    stream = list(chain(*firsts(make())))
    first = make()
    batches = iter(first)
    for _ in range(4):
        next(batches)
    second = make(batch_size=3, accumulate=1)
    second.load_state_dict(first.state_dict())
    next(iter(second))
    third = make(batch_size=3, accumulate=1)
    third.load_state_dict(second.state_dict())
    assert list(chain(*firsts(third))) == stream[11:17]


def test_other_data_or_another_seed_is_told(make, caplog):
    state = make().state_dict()
    make().load_state_dict(state)
    assert caplog.text == ""
    make(seed=1, context=8).load_state_dict(state)
    assert "seed 0 -> 1" in caplog.text
    assert "context 4 -> 8" in caplog.text


def test_it_leaves_the_runs_random_stream_alone(make):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(make())
    assert torch.equal(torch.rand(3), expected)


def test_its_state_is_plain_numbers_that_a_weights_only_checkpoint_can_hold(make, tmp_path):
    state = make().state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
