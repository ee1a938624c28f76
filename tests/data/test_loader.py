"""Which samples are read when and by whom, and the training loader's place in the run."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.data.loader import FilledUp, ResumableLoader, StepSampler, equal_batches
from flashtrain.data.packing import PackedSamples, Spans


def steps_of(samples, *, world_size, accumulate, batch_size, seed=0):
    """The set of samples of each optimizer step, over all ranks."""
    options = {
        "batch_size": batch_size,
        "accumulate": accumulate,
        "world_size": world_size,
        "seed": seed,
    }
    steps = [[] for _ in range(6)]
    for rank in range(world_size):
        for number, micro_batch in enumerate(
            StepSampler(samples, total_steps=6, rank=rank, **options)
        ):
            assert len(micro_batch) == batch_size
            steps[number // accumulate] += micro_batch
    return [sorted(step) for step in steps]


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


def test_the_order_is_frozen_and_depends_on_the_seed_alone():
    # A run resumed under another version of numpy or flashtrain must go on in the same order.
    orders = [
        next(iter(StepSampler(10, batch_size=10, total_steps=1, seed=seed))) for seed in (7, 7, 8)
    ]
    assert orders[0] == orders[1] == [4, 5, 9, 8, 1, 7, 6, 0, 2, 3] != orders[2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_validation_reads_the_same_first_samples_whatever_the_shares(world_size, batch_size):
    ranks = [
        equal_batches(24, batch_size=batch_size, world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    shares = [list(chain(*sampler)) for sampler in ranks]
    assert sorted(chain(*shares)) == list(range(24))
    assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize(("samples", "world_size"), [(23, 1), (23, 2), (7, 4), (9, 8), (3, 8)])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_each_sample_is_validated_once_where_devices_do_not_divide_them(
    samples, world_size, batch_size
):
    # pytorch#25162, verl#78: a remainder was left out, or samples were read twice. -1 is
    # a row without labels.
    ranks = [
        equal_batches(samples, batch_size=batch_size, world_size=world_size, rank=r)
        for r in range(world_size)
    ]
    read = list(chain(*chain(*ranks)))
    assert sorted(number for number in read if number >= 0) == list(range(samples))
    assert len({len(batches) for batches in ranks}) == 1


@pytest.mark.parametrize(
    ("samples", "batch_size", "sizes"), [(24, 10, [8] * 3), (23, 10, [8] * 3), (5, 8, [5])]
)
def test_validation_batches_are_of_one_size(samples, batch_size, sizes):
    assert [len(batch) for batch in equal_batches(samples, batch_size=batch_size)] == sizes


def test_a_row_that_fills_up_has_no_labels():
    samples = PackedSamples(np.arange(41, dtype=np.uint16), Spans(np.array([0]), np.array([41])), 4)
    labels = FilledUp(samples)[[9, -1]]["labels"]
    assert labels.tolist() == [[37, 38, 39, 40], [-100] * 4]


def make(*, workers=0, seed=0, context=4, batch_size=2, accumulate=2):
    samples = PackedSamples(
        np.arange(321, dtype=np.uint16), Spans(np.array([0]), np.array([321])), context
    )
    sampler = StepSampler(
        len(samples), batch_size=batch_size, total_steps=5, accumulate=accumulate, seed=seed
    )
    return ResumableLoader(samples, sampler, num_workers=workers)


def firsts(batches):
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def after(count, **options):
    """The state of a loader of which so many batches were taken."""
    loader = make(**options)
    list(islice(loader, count))
    return loader.state_dict()


def resumed(state, **options):
    loader = make(**options)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_state_saved_midway_gives_exactly_the_rest_and_a_step_begun_is_read_again(
    workers, tmp_path
):
    whole = firsts(make())
    for taken, rest in ((6, 6), (5, 4)):
        state = after(taken, workers=workers)
        assert (state["step"], state["samples_read"]) == (rest // 2, 2 * rest)
        torch.save(state, tmp_path / "state.pt")
        loader = resumed(torch.load(tmp_path / "state.pt", weights_only=True), workers=workers)
        assert firsts(loader) == whole[rest:]
        assert len(loader) == len(whole) == 10


def test_a_loop_that_only_looked_starts_where_it_was_and_a_finished_pass_is_followed_by_the_next():
    loader = make()
    first_look = next(iter(loader))["tokens"]
    first_pass = firsts(loader)
    assert first_look[:, 0].tolist() == first_pass[0]
    second_pass = firsts(loader)
    assert len(second_pass) == 10
    # 80 samples an epoch, 20 a pass: nothing is read twice before the fifth.
    assert not set(chain(*first_pass)) & set(chain(*second_pass))


def test_another_batch_size_goes_on_with_the_next_sample_also_after_the_last_resume():
    stream = list(chain(*firsts(make())))
    second = resumed(after(4), batch_size=3, accumulate=1)
    next(iter(second))
    third = resumed(second.state_dict(), batch_size=3, accumulate=1)
    assert list(chain(*firsts(third))) == stream[11:17]
    assert third.state_dict()["samples_read"] == 17


def test_other_data_or_another_seed_is_reported(caplog):
    state = make().state_dict()
    resumed(state)
    assert caplog.text == ""
    resumed(state, seed=1, context=8)
    assert "seed 0 -> 1" in caplog.text
    assert "context 4 -> 8" in caplog.text


def test_it_leaves_the_runs_random_stream_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(make())
    assert torch.equal(torch.rand(3), expected)
