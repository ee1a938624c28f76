"""Which held-out text is scored."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashtrain.data.split import Spans
from flashtrain.errors import UserError
from flashtrain_recipes.long_context.evaluate import held_out_windows


def corpus(folder, lengths):
    """A token cache of documents of these lengths, whose tokens count on from 0, all of them held out."""
    tokens = np.arange(sum(lengths), dtype="uint16")
    tokens.tofile(folder / "tokens.bin")
    ends = np.cumsum(lengths)
    cache = SimpleNamespace(
        tokens=tokens,
        tokens_path=folder / "tokens.bin",
        meta=SimpleNamespace(dtype="uint16"),
        tokenizer=SimpleNamespace(vocab_size=2**16),
    )
    return cache, Spans(ends - lengths, ends)


def begins(windows) -> list[int]:
    return windows.tokens[:, 0].tolist()


def test_windows_lie_within_documents_and_documents_take_turns(tmp_path) -> None:
    cache, held_out = corpus(tmp_path, [25, 5, 40, 21])  # 2, 0, 3 and 2 windows of 10 with their label
    windows = held_out_windows(cache, held_out, window=10, most=100)
    assert begins(windows) == [0, 30, 70, 10, 40, 80, 50]
    assert windows.units.tolist() == [0, 2, 3, 0, 2, 3, 2]
    assert (windows.unit, windows.count) == ("documents", 3)
    assert torch.equal(windows.tokens, torch.tensor(begins(windows))[:, None] + torch.arange(11))


def test_few_windows_are_of_many_documents(tmp_path) -> None:
    cache, held_out = corpus(tmp_path, [25, 5, 40, 21])
    assert begins(held_out_windows(cache, held_out, window=10, most=3)) == [0, 30, 70]


def test_the_windows_of_a_single_document_are_units_themselves(tmp_path) -> None:
    cache, held_out = corpus(tmp_path, [35, 4])
    windows = held_out_windows(cache, held_out, window=10, most=100)
    assert (windows.unit, windows.units.tolist()) == ("windows", [0, 1, 2])


def test_short_documents_are_laid_end_to_end(tmp_path) -> None:
    cache, held_out = corpus(tmp_path, [8, 9, 10])
    windows = held_out_windows(cache, held_out, window=10, most=100)
    assert (windows.unit, begins(windows)) == ("windows", [0, 10])
    assert windows.tokens[1].tolist() == list(range(10, 21))


def test_held_out_text_shorter_than_a_window_is_refused(tmp_path) -> None:
    cache, held_out = corpus(tmp_path, [8])
    with pytest.raises(UserError, match="8 tokens are fewer than the 11"):
        held_out_windows(cache, held_out, window=10, most=100)
