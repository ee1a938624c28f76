"""Masked samples in both layouts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from flashtrain.data.masked_samples import MaskedSamples
from flashtrain.data.masking import score_arguments
from flashtrain.data.packing import Spans
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.models import Bert, BertConfig

SPECIAL = SpecialTokens.past(50)
LENGTHS = [4, 9, 1, 6, 12, 3, 3, 8, 5, 7]
TOKENS = np.random.default_rng(0).integers(0, 50, sum(LENGTHS)).astype(np.uint16)
ENDS = np.cumsum(LENGTHS)
PIECES = Spans(ENDS - LENGTHS, ENDS)


@pytest.fixture
def make():
    def samples(**options) -> MaskedSamples:
        return MaskedSamples(TOKENS, PIECES, SPECIAL, **{"budget": 64, **options})

    return samples


def unmasked(batch) -> torch.Tensor:
    """The tokens with the labels put back, padded ones flattened."""
    flat = batch["tokens"].flatten().clone()
    real = batch["labels"] != -100
    flat[batch["masked"][real]] = batch["labels"][real]
    return flat


def texts(batch) -> list[list[int]]:
    """Each sample's tokens, with the labels put back."""
    if "cu_seqlens" in batch:
        ends = batch["cu_seqlens"].tolist()
        flat = unmasked(batch).tolist()
        return [flat[a:b] for a, b in itertools.pairwise(ends) if b > a]
    rows = unmasked(batch).view_as(batch["tokens"]).tolist()
    return [row[:length] for row, length in zip(rows, batch["lengths"].tolist(), strict=True)]


def piece(number: int) -> list[int]:
    return TOKENS[PIECES.begins[number] : PIECES.ends[number]].tolist()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_sample_is_its_piece_between_cls_and_sep(make, layout):
    samples = make(layout=layout)
    batch = samples[samples.row([1, 12, 7])]
    expected = [[SPECIAL.classify, *piece(number), SPECIAL.separate] for number in (1, 2, 7)]
    assert texts(batch) == expected
    assert (batch["sequences"], batch["real_tokens"], batch["pairs"]) == (
        3,
        24,
        11**2 + 3**2 + 10**2,
    )
    assert batch["label_count"] == 1 + 1 + 1


def test_a_packed_row_is_filled_up_with_what_counts_nowhere(make):
    samples = make()
    batch = samples[samples.row([1, 12, 7])]
    assert batch["tokens"].shape == (64,)
    assert (batch["tokens"][24:] == SPECIAL.pad).all()
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist()[:5] == [0, 11, 14, 24, 24]
    assert batch["cu_seqlens"].shape == (samples.max_sequences + 1,)
    assert batch["masked"].shape == batch["labels"].shape == (samples.max_labels,)
    assert (batch["labels"] != -100).sum() == 3


def test_no_row_has_more_labels_than_there_is_room_for(make):
    for options in ({}, {"share": 0.5}, {"share": 0.01}, {"budget": 200}):
        samples = make(**options)
        rows = [
            list(range(4)),
            [2, 12, 22, 32, 42, 52, 5, 6][: samples.max_sequences],
            [4, 1, 7, 9],
        ]
        assert all(len(samples[samples.row(row)]["labels"]) == samples.max_labels for row in rows)


def test_every_epoch_masks_other_tokens_and_a_sample_the_same_in_any_row(make):
    samples = make(budget=100)
    first, second = samples[samples.row([4, 7])], samples[samples.row([14, 17])]
    assert texts(first) == texts(second)
    assert not torch.equal(first["masked"], second["masked"])
    alone = samples[samples.row([7])]
    assert torch.equal(alone["tokens"][:10], first["tokens"][14:24])
    other_seed = make(budget=100, seed=1)
    assert not torch.equal(other_seed[other_seed.row([4, 7])]["tokens"], first["tokens"])


def test_both_layouts_are_one_batch_to_a_model(make):
    torch.manual_seed(0)
    config = BertConfig.of_size("tiny", vocab_size=SPECIAL.vocab_size, context=64)
    model = Bert(config, "sdpa").double()
    losses = []
    for layout in ("packed", "padded"):
        samples = make(layout=layout)
        batch = samples[samples.row([0, 1, 3, 4])]
        arguments = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
        losses.append(model.loss(**arguments).item())
        score = model.score(**score_arguments(batch))
        assert score.labels == batch["label_count"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_an_empty_row_counts_nothing(make):
    batch = make()[make().row([])]
    assert batch["real_tokens"] == 0
    assert (batch["labels"] == -100).all()
