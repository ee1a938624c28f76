"""How bert-speed batches its sequences: everything once, nothing beyond the
budget, packed rows full."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.models import BERT_SIZES
from flashtrain.settings import options
from flashtrain_kernels.loss_head import IGNORED
from flashtrain_recipes.bert_benchmark.batches import (
    Sequences,
    bucket_batches,
    masked_batches,
    packed_batches,
    padded,
    random_batches,
)

CPU = torch.device("cpu")
lengths_drawn = st.lists(st.integers(3, 512), min_size=1, max_size=60).map(np.array)


@given(lengths_drawn)
def test_every_sequence_is_in_one_batch_however_they_are_batched(lengths) -> None:
    packed, budget = packed_batches(lengths, 1024)
    for batches in (packed, bucket_batches(lengths, 1024), random_batches(lengths, 7)):
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert budget <= 1024
    assert all(lengths[row].sum() <= budget for row in packed)


def test_packed_rows_of_a_real_distribution_are_nearly_full() -> None:
    lengths = np.clip(np.random.RandomState(0).exponential(100, 2000).astype(int), 10, 512)
    rows, budget = packed_batches(lengths, 8192)
    assert lengths.sum() / (len(rows) * budget) > 0.97


def test_full_rows_are_packed_into_one_without_a_gap() -> None:
    rows, budget = packed_batches(np.full(8, 128), 8 * 128)
    assert (len(rows), budget) == (1, 8 * 128)


def test_all_batchings_have_the_same_tokens_and_labels() -> None:
    drawn = Sequences.draw(np.array([5, 60, 17, 64, 9]), 1000, seed=1)
    assert int((drawn.labels != IGNORED).sum()) == 1 + 9 + 2 + 9 + 1
    packed, budget = packed_batches(drawn.lengths, 128)
    rows = masked_batches(drawn, packed, CPU, budget=budget)
    in_rows = masked_batches(drawn, random_batches(drawn.lengths, 2), CPU, budget=None)
    for batches in (rows, in_rows):
        labels = torch.cat([batch["labels"][batch["labels"] != IGNORED] for batch in batches])
        assert sorted(labels.tolist()) == sorted(drawn.labels[drawn.labels != IGNORED].tolist())
        tokens = torch.cat([batch["tokens"].flatten() for batch in batches])
        assert sorted(tokens[tokens != 0].tolist()) == sorted(
            drawn.tokens[drawn.tokens != 0].tolist()
        )
        assert len({batch["labels"].shape for batch in batches}) == 1
    assert len({batch["tokens"].shape for batch in rows}) == 1


@pytest.mark.parametrize(("lengths", "width", "full"), [([5, 60], 60, False), ([64, 64], 64, True)])
def test_padded_rows_are_as_wide_as_the_longest_rounded_up(lengths, width, full) -> None:
    drawn = Sequences.draw(np.array(lengths), 1000, seed=1)
    batch = padded(drawn, np.array([0, 1]), CPU)
    assert (batch["tokens"].shape[1], "lengths" not in batch) == (width, full)


def test_the_sizes_in_the_settings_are_those_of_the_models() -> None:
    assert set(get_args(options.BertSize)) == set(BERT_SIZES)
