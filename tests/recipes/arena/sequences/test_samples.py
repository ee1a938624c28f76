"""Batches of sequences: padding, lengths, and the order that a resumed run goes on with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashtrain.data.sequences import SequenceDataModule, SequenceShape
from flashtrain.errors import UserError
from flashtrain_recipes.arena.sequence_samples import Sequences, SequenceSamples


def sequences(*lengths: int) -> Sequences:
    """Sequence n holds the token n + 1."""
    tokens = np.concatenate(
        [np.full(length, number + 1, dtype=np.uint8) for number, length in enumerate(lengths)]
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences(tokens, offsets, np.arange(len(lengths), dtype=np.uint8))


class Numbered:
    """Samples whose one token is their number."""

    shape = SequenceShape(classes=2, length=1)

    def describe(self) -> str:
        return "numbers"

    def prepare(self) -> None:
        pass

    def split(self, name: str) -> SequenceSamples:
        count = {"train": 20, "validation": 7, "test": 5}[name]
        return SequenceSamples(
            Sequences(
                np.arange(count, dtype=np.uint8),
                np.arange(count + 1),
                np.arange(count, dtype=np.uint8),
            ),
            1,
        )


def test_rows_are_cut_to_the_context_and_padded_to_a_multiple_of_64() -> None:
    batch = SequenceSamples(sequences(3, 70, 200), context=100)[[1, 0]]
    assert batch["tokens"].shape == (2, 100)
    assert batch["lengths"].tolist() == [70, 3]
    assert batch["labels"].tolist() == [1, 0]
    assert batch["tokens"][1].tolist() == [1] * 3 + [0] * 97
    assert SequenceSamples(sequences(3, 70, 200), context=100)[[0]]["tokens"].shape == (1, 64)
    assert SequenceSamples(sequences(3, 70), context=100, fixed=True)[[0]]["tokens"].shape == (
        1,
        100,
    )
    assert "lengths" not in SequenceSamples(sequences(64, 64), context=64)[[0, 1]]
    # A token of padding.
    assert SequenceSamples(sequences(0, 64), context=64)[[0]]["lengths"].tolist() == [1]


def test_pairs_are_two_rows_of_a_sample() -> None:
    pairs = sequences(3, 5, 2, 4)._replace(labels=np.array([1, 0], dtype=np.uint8))
    batch = SequenceSamples(pairs, context=64)[[1, 0]]
    assert batch["tokens"].shape == (2, 2, 64)
    assert batch["lengths"].tolist() == [[2, 4], [3, 5]]
    assert batch["tokens"][0, 1, :4].tolist() == [4] * 4


def test_a_choice_keeps_the_samples() -> None:
    whole = sequences(3, 5, 2, 4)
    assert SequenceSamples(whole.chosen(np.array([3, 0])), 64)[[0, 1]]["lengths"].tolist() == [4, 3]


def test_every_sample_is_read_once_an_epoch_and_validation_reads_them_in_order() -> None:
    data = SequenceDataModule(Numbered(), 5, total_steps=8, seed=1)
    seen = torch.cat([batch["tokens"].flatten() for batch in data.train_dataloader()])
    assert sorted(seen[:20].tolist()) == sorted(seen[20:].tolist()) == list(range(20))
    assert seen[:20].tolist() != seen[20:].tolist()
    assert torch.cat(
        [batch["tokens"] for batch in data.val_dataloader()]
    ).flatten().tolist() == list(range(7))
    limited = SequenceDataModule(Numbered(), 5, validation_samples=3)
    assert len(torch.cat([batch["tokens"] for batch in limited.val_dataloader()])) == 3


def test_arguments_out_of_range_are_one_line() -> None:
    with pytest.raises(UserError, match="batch_size=0"):
        SequenceDataModule(Numbered(), 0)
