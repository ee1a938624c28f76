"""Masked text end to end: every piece once an epoch on all devices together."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flashtrain.data.balance import Cost
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.errors import UserError

TEXT = "\n\n".join(
    f"Paragraph {number} says: " + "word " * (3 + number * 7 % 23) for number in range(300)
)


@pytest.fixture
def make(list_source):
    def data(**options) -> MaskedTextDataModule:
        module = MaskedTextDataModule(
            list_source([TEXT, TEXT[::-1][:3000], "short. text. here."]),
            "bytes",
            **{
                "context": 128,
                "token_budget": 1024,
                "total_steps": 20,
                "validation_fraction": 0.3,
                **options,
            },
        )
        module.setup()
        return module

    return data


def placed(module: MaskedTextDataModule, world_size: int, rank: int) -> MaskedTextDataModule:
    return mock.patch.object(module, "_place", return_value=(world_size, rank))


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) if isinstance(x, torch.Tensor) else x == other[name]
        for name, x in one.items()
    )


def test_batches_are_full_rows_of_masked_paragraphs(make):
    data = make()
    batches = list(data.train_dataloader())
    assert len(batches) == 20
    assert all(batch["tokens"].shape == (1024,) for batch in batches)
    assert sum(batch["real_tokens"] for batch in batches) / 20 / 1024 > 0.98
    assert data.vocab_size == 261
    assert all((batch["tokens"] == data.special.mask).any() for batch in batches)


def test_what_memory_is_estimated_for_holds_the_padding(make):
    data = make(layout="padded")
    largest = max(batch["tokens"].numel() for batch in data.train_dataloader())
    assert 1024 < largest <= 1.25 * 1024 * data.padding()


def test_all_devices_together_read_each_sample_once_and_agree_on_the_step(make):
    data = make(cost=Cost(1.0, 0.01), total_steps=12)
    ranks = []
    for rank in range(3):
        with placed(data, 3, rank):
            loader = data.train_dataloader()
            ranks.append((list(loader), list(loader.steps), loader.state_dict()))
    assert ranks[0][2] == ranks[1][2] == ranks[2][2]
    numbers = [number for _, rows, _ in ranks for row in rows for number in row.numbers]
    assert (
        len(set(numbers))
        == len(numbers)
        == ranks[0][2]["next_number"] - len(ranks[0][2]["waiting"])
    )
    for step in zip(*(batches for batches, _, _ in ranks), strict=True):
        counts = {batch["label_count"].item() for batch in step}
        labels = sum(int((batch["labels"] != -100).sum()) for batch in step)
        assert len(counts) == 1
        assert counts.pop() == pytest.approx(labels / 3)


def test_validation_reads_every_held_out_sample_once_masked_alike_each_time(make):
    data = make()
    once, again = list(data.val_dataloader()), list(data.val_dataloader())
    assert all(equal(one, other) for one, other in zip(once, again, strict=True))
    samples = len(data.pieces(data.split.validation).begins)
    assert sum(batch["sequences"] for batch in once) == samples
    with placed(data, 2, 0):
        half = data.val_dataloader()
    with placed(data, 2, 1):
        other = data.val_dataloader()
    assert len(half) == len(other)
    assert sum(batch["sequences"] for part in (half, other) for batch in part) == samples


def test_a_context_without_room_for_a_token_is_refused(make):
    with pytest.raises(UserError, match="context=2 must be at least 3"):
        make(context=2)
