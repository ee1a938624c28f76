"""A plain Lightning script under ContextParallelStrategy trains as one process does;
ranks that fail are named.

What gloo ranks do is in strategy_ranks.py, which is started once (conftest.py).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import strategy_ranks
import torch
from strategy_ranks import PlainTask, begun, our_task, trainer, twenty_steps, whole_model

import flashtrain
from flashtrain.distributed.context.batch import shard_batch
from flashtrain.distributed.context.watchdog import Beat, Record
from flashtrain.errors import RunFailed, UserError


@pytest.fixture(scope="module", autouse=True)
def quiet():
    strategy_ranks.quiet()


def mean(ranks, key):
    return np.mean([rank[key] for rank in ranks], axis=0)


def test_a_plain_script_has_one_process_loss_curve(four, two, tmp_path):
    expected = twenty_steps(tmp_path)
    assert len(expected["losses"]) == 40  # twenty optimizer steps of two batches, clipped
    for found in (four["twenty"], two["twenty"]):
        np.testing.assert_allclose(mean(found, "losses"), expected["losses"], rtol=1e-12)
        assert [rank["validation"] for rank in found] == pytest.approx(
            [expected["validation"]] * len(found), rel=1e-12
        )


@pytest.mark.parametrize("case", ["dp2 x cp2", "selective", "full"])
def test_gradients_of_the_whole_model_are_one_process_gradients(four, tmp_path, case):
    """dp2 x cp2 with one row a data rank, whose rows have different numbers of labels;
    checkpointing on four ranks."""
    found = four[case]
    expected = whole_model(tmp_path, 2)
    np.testing.assert_allclose(mean(found, "losses"), expected["losses"], rtol=1e-12)
    for rank in found:
        np.testing.assert_allclose(rank["gradients"], expected["gradients"], atol=1e-13, rtol=0)


def test_a_checkpoint_of_degree_four_goes_on_at_degree_two(four, two, tmp_path):
    expected = begun(tmp_path, 6)
    np.testing.assert_allclose(np.mean(four["begun"], axis=0), expected[:3], rtol=1e-12)
    np.testing.assert_allclose(np.mean(two["resumed"], axis=0), expected[3:], rtol=1e-12)


def test_our_language_model_logs_what_one_process_logs(two, tmp_path):
    expected = our_task(tmp_path)
    for rank in two["our task"]:
        # Lightning keeps logged numbers in float32.
        assert rank == pytest.approx(expected, rel=1e-5)


def test_nothing_of_a_step_is_left_after_it(two):
    assert two["left"] == [[], []]  # four steps of a task that logs the mean of its loss


def test_a_step_that_steps_its_optimizer_itself_need_not_weight_its_loss(two, tmp_path):
    expected = strategy_ranks.by_hand(tmp_path, "leaves")
    for of_rank in two["by hand"]:
        for found in of_rank:
            assert found == pytest.approx(expected, rel=1e-6)


def test_a_stuck_rank_ends_the_job_and_is_named(strategy_ranks):
    folder = strategy_ranks / "stuck"
    assert json.loads((folder / "codes.json").read_text()) == [RunFailed.status] * 4
    for rank in range(4):
        assert "rank 2 of 4 is stuck at a batch" in (folder / f"{rank}.out").read_text()
        assert "rank 2 of 4 is stuck" in (folder / f"{rank}.verdict").read_text()


def test_a_dead_rank_ends_the_job_and_is_named(strategy_ranks):
    folder = strategy_ranks / "dead"
    assert json.loads((folder / "codes.json").read_text()) == [RunFailed.status, 7]
    assert "rank 1 of 2 has died or hangs at" in (folder / "0.out").read_text()


@pytest.mark.parametrize(("option", "name"), [("layout", "zig-zag"), ("method", "rign")])
def test_names_that_do_not_exist_are_refused(option, name):
    with pytest.raises(UserError, match=f"{option} '{name}'. Did you mean"):
        flashtrain.ContextParallelStrategy(**{option: name})


@pytest.mark.parametrize("size", [0, 3])
def test_degrees_that_do_not_fit_are_refused_before_anything_is_built(size):
    strategy = flashtrain.ContextParallelStrategy(size)
    strategy.parallel_devices = [torch.device("cpu")] * 8
    with pytest.raises(UserError, match=rf"context_parallel={size} on 8 devices\. .* 1, 2, 4, 8"):
        strategy.setup_environment()
    assert not torch.distributed.is_initialized()


class Alone:
    """A group of one rank of two, for what needs no communication."""

    size, rank, data_group = 2, 0, None


def test_a_batch_is_sharded_by_name():
    batch = {
        "tokens": torch.arange(16).view(1, 16), "labels": torch.arange(1, 17).view(1, 16),
        "weight": torch.ones(3),
        "name": "text",
    }  # fmt: skip
    part, sequence = shard_batch(batch, Alone(), layout="contiguous")
    assert torch.equal(part["tokens"], torch.arange(8).view(1, 8))
    assert torch.equal(part["labels"], torch.arange(1, 9).view(1, 8))
    assert part["weight"] is batch["weight"]
    assert part["name"] == "text"
    assert torch.equal(sequence.positions(8, torch.device("cpu")), torch.arange(8)[None])
    with pytest.raises(UserError, match="7 tokens, expected 8 of 16"):
        sequence.positions(7, torch.device("cpu"))


@pytest.mark.parametrize("name", ["position_ids", "cu_seq_lens_q"])
def test_work_is_balanced_by_the_documents_of_transformers_batches(name):
    ids = torch.tensor([[0] * 30 + [1] * 34])
    given = {
        "position_ids": torch.cat([torch.arange(30), torch.arange(34)])[None],
        "cu_seq_lens_q": torch.tensor([0, 30, 64]),
    }
    expected, _ = shard_batch({"tokens": ids, "documents": ids}, Alone())
    found, _ = shard_batch({"tokens": ids, name: given[name]}, Alone())
    plain, _ = shard_batch({"tokens": ids, name: given[name]}, Alone(), documents=None)
    assert torch.equal(found["tokens"], expected["tokens"])
    assert not torch.equal(found["tokens"], plain["tokens"])


def test_losses_are_weighted_by_the_labels_that_count():
    labels = torch.full((1, 16), -100)
    labels[:, 6:14] = 3
    part, sequence = shard_batch({"tokens": labels, "labels": labels}, Alone(), layout="contiguous")
    assert sequence.weight == 2 * 2 / 8
    # Without a single label a rank computes one, for nothing: its mean would be 0 / 0.
    part, sequence = shard_batch(
        {"tokens": labels, "labels": labels.roll(8, 1).masked_fill(torch.arange(16) < 8, -100)},
        Alone(), layout="contiguous",
    )  # fmt: skip
    assert sequence.weight == 0
    assert (part["labels"] != -100).sum() == 1


@pytest.mark.parametrize(
    ("batch", "has"),
    [([torch.ones(1, 4)], r"list \(\)"), ({"text": torch.ones(1, 4)}, r"dict \(text\)")],
)
def test_a_batch_without_tokens_says_what_it_has(batch, has):
    with pytest.raises(
        UserError, match=rf"a batch of type {has} .* a dictionary with 'tokens' or 'input_ids'"
    ):
        shard_batch(batch, Alone())


class WithOwnParameter(PlainTask):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(1))


def test_parameters_outside_of_submodules_need_a_configure_model(tmp_path):
    one = flashtrain.ContextParallelStrategy()
    try:
        with pytest.raises(UserError, match=r"parameters of its own \(temperature\)"):
            trainer(tmp_path, max_steps=1, strategy=one, devices=1).fit(
                WithOwnParameter(), strategy_ranks.Loaders(4)
            )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "now", "verdict"),
    [
        ({}, 5, None),
        # The others may end by themselves.
        ({2: Beat("failed", 2, 1, "out of memory")}, 11.5, None),
        ({2: Beat("failed", 2, 1, "out of memory")}, 12.5, "rank 2 of 3 has failed: out of memory"),
        ({1: Beat("gone", 2, 1, "step 1")}, 55, None),
        ({2: None}, 12.5, "rank 2 of 3 has died or hangs at the start: no sign of it for 10 s"),
    ],
)
def test_verdicts(changes, now, verdict):
    """silence 10 s, timeout 100 s; times in seconds; all ranks but the changed ones write on."""
    record = Record(3, 10, 100, now=0)
    for rank in range(3):
        last = changes.get(rank, Beat("alive", 9, 1, "step 1"))
        if last is not None:
            record.note(rank, Beat("alive", 1, 1, "step 1"), now=1)
            record.note(rank, last, now=2 if rank in changes else now)
    assert record.verdict(now) == verdict
