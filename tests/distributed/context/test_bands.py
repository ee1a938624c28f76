"""The calls without a mask that a rank's part of a plain mask falls into: together they
see what the mask shows."""

from __future__ import annotations

import pytest
import torch

from flashtrain.distributed.context.layouts import balanced, contiguous, zigzag
from flashtrain.distributed.context.local_mask import CAUSAL, FULL, BandCall, LocalMasks, Part
from flashtrain_kernels import Mask, masks


def local_part(
    mask: Mask, queries: torch.Tensor | None, keys: torch.Tensor | None, **options: bool
) -> Part:
    return LocalMasks(mask, 1, 64, torch.float32, **options).part(queries, keys)


def seen(calls: tuple[BandCall, ...], queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(S, S) bool by places in the sequence: what the calls show."""
    length = int(max(queries.max(), keys.max())) + 1
    found = torch.zeros(length, length, dtype=torch.bool)
    for call in calls:
        rows, columns = queries[call.queries], keys[: call.keys]
        shown = masks.sliding_window(len(columns), call.window).dense()[
            0, len(columns) - len(rows) :
        ]
        if len(rows) > len(columns):
            shown = torch.ones(len(rows), len(columns), dtype=torch.bool)
        found[rows[:, None], columns] |= shown
    return found


@pytest.mark.parametrize("length", [48, 45])
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("make", [zigzag, contiguous])
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_a_rank_with_few_runs_needs_no_mask_against_any_keys(length, degree, make, kind) -> None:
    mask = {"causal": masks.causal, "full": masks.full}[kind](length)
    layout = make(mask, degree)
    whole = mask.dense()[0]
    for rank in range(degree):
        own = layout.tokens[:, rank]
        for keys in (None, *(layout.tokens[:, other] for other in range(degree))):
            calls = local_part(mask, own, keys)
            assert not isinstance(calls, Mask)
            assert len(calls) <= 2
            rows, columns = own[own >= 0], torch.arange(length) if keys is None else keys[keys >= 0]
            expected = torch.zeros(length, length, dtype=torch.bool)
            expected[rows[:, None], columns] = whole[rows[:, None], columns]
            got = torch.zeros(length, length, dtype=torch.bool)
            shown = seen(calls, rows, columns)
            got[: len(shown), : len(shown)] = shown
            assert torch.equal(got, expected)


def test_the_whole_of_a_window_is_one_call_and_a_part_of_it_a_mask() -> None:
    mask = masks.sliding_window(40, (5, 2))
    assert local_part(mask, None, None) == (BandCall(slice(0, 40), 40, (5, 2)),)
    assert isinstance(local_part(mask, torch.arange(20)[None], None), Mask)


def test_documents_many_runs_and_dropout_keep_their_mask() -> None:
    documents = masks.document(torch.arange(40)[None] // 20, causal=True)
    assert isinstance(local_part(documents, torch.arange(20)[None], None), Mask)
    assert isinstance(local_part(masks.causal(40), torch.arange(0, 40, 2)[None], None), Mask)
    assert isinstance(
        local_part(masks.causal(40), torch.arange(20)[None], None, dropout=True), Mask
    )
    rows = torch.stack([torch.arange(20), torch.arange(20, 40)])
    assert isinstance(local_part(masks.causal(40), rows, None), Mask)


def test_plain_sequences_are_sharded_in_few_runs_where_that_is_even() -> None:
    causal, full = masks.causal(4096), masks.full(4096)
    assert torch.equal(balanced(causal, 4).tokens, zigzag(causal, 4).tokens)
    assert torch.equal(balanced(full, 4).tokens, contiguous(full, 4).tokens)
    assert causal.band == CAUSAL
    assert full.band == FULL
