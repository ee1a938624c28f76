"""Which samples are read when, and by whom."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain.data.loader import FixedSampler, StepSampler


def steps_of(samples, *, world_size, accumulate, batch_size, total_steps=6, seed=0):
    """The set of samples of each optimiser step, over all ranks."""
    steps = [[] for _ in range(total_steps)]
    for rank in range(world_size):
        sampler = StepSampler(
            samples,
            batch_size=batch_size,
            total_steps=total_steps,
            accumulate=accumulate,
            world_size=world_size,
            rank=rank,
            seed=seed,
        )
        for number, micro_batch in enumerate(sampler):
            assert len(micro_batch) == batch_size
            steps[number // accumulate] += micro_batch
    return [sorted(step) for step in steps]


def test_a_property_has_no_time_to_be_shown_in():
    assert settings().deadline is None  # Hypothesis' own is 200 ms, which a busy machine may need for any example


@given(st.integers(1, 50), st.integers(0, 3))
def test_a_step_reads_the_same_samples_however_devices_and_micro_batches_share_them(samples, seed):
    shares = [(1, 1, 12), (1, 4, 3), (2, 1, 6), (2, 3, 2), (3, 2, 2), (4, 3, 1), (12, 1, 1)]
    found = [
        steps_of(samples, world_size=world, accumulate=accumulate, batch_size=batch, seed=seed)
        for world, accumulate, batch in shares
    ]
    assert all(steps == found[0] for steps in found)


@given(st.integers(1, 40), st.integers(1, 7))
def test_an_epoch_reads_every_sample_once_in_an_order_of_its_own(samples, batch_size):
    sampler = StepSampler(samples, batch_size=batch_size, total_steps=3 * samples)
    stream = [sample for micro_batch in sampler for sample in micro_batch]
    epochs = [stream[begin : begin + samples] for begin in range(0, 3 * samples, samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    if samples > 20:
        assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_alone():
    orders = [list(StepSampler(100, batch_size=10, total_steps=5, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_the_order_is_frozen():
    # A run resumed under another version of numpy or flashtrain must go on in the same order.
    assert next(iter(StepSampler(10, batch_size=10, total_steps=1, seed=7))) == FROZEN_ORDER


FROZEN_ORDER = [4, 5, 9, 8, 1, 7, 6, 0, 2, 3]


def test_its_length_is_the_whole_runs_and_it_begins_where_it_is_told():
    sampler = StepSampler(100, batch_size=2, total_steps=5, accumulate=2)
    whole = list(sampler)
    assert len(sampler) == len(whole) == 10
    sampler.begin, sampler.end = 4, 10
    assert list(sampler) == whole[4:]
    assert len(sampler) == 10


def test_lightnings_set_epoch_changes_nothing():
    sampler = StepSampler(100, batch_size=4, total_steps=20)
    before = list(sampler)
    sampler.set_epoch(3)
    assert list(sampler) == before


def test_its_permutations_stay_behind_when_it_is_pickled():
    sampler = StepSampler(100_000, batch_size=4, total_steps=2)
    before = list(sampler)
    sent = pickle.dumps(sampler)
    assert len(sent) < 2000
    assert list(pickle.loads(sent)) == before


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_validation_reads_the_same_first_samples_whatever_the_shares(world_size, batch_size):
    shares = [
        [
            sample
            for batch in FixedSampler(24, batch_size=batch_size, world_size=world_size, rank=rank)
            for sample in batch
        ]
        for rank in range(world_size)
    ]
    assert sorted(sample for share in shares for sample in share) == list(range(24))
    assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize(("samples", "batch_size", "sizes"), [(24, 10, [8] * 3), (23, 10, [10, 10, 3]), (5, 8, [5])])
def test_validation_batches_are_of_one_size_where_that_is_not_much_smaller(samples, batch_size, sizes):
    assert [len(batch) for batch in FixedSampler(samples, batch_size=batch_size)] == sizes


def test_every_device_validates_on_something():
    batches = [list(FixedSampler(2, batch_size=4, world_size=3, rank=rank)) for rank in range(3)]
    assert batches == [[[0]], [[1]], [[0]]]
