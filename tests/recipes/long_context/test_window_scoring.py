"""Which held-out text is scored; every context on the same tokens, from as much text
before them as it holds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashtrain.data.packing import Spans
from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig
from flashtrain_recipes.long_context.evaluate import held_out_windows, score_windows


def corpus(lengths):
    """A token cache of documents of these lengths, whose tokens count on from
    0, all of them held out."""
    tokens = np.arange(sum(lengths), dtype="uint16")
    ends = np.cumsum(lengths)
    cache = SimpleNamespace(tokens=tokens, tokenizer=SimpleNamespace(vocab_size=2**16))
    return cache, Spans(ends - lengths, ends)


@pytest.mark.parametrize(
    ("lengths", "most", "begins", "unit", "units"),
    [
        # 2, 0, 3 and 2 windows of 10 with their label; documents take turns
        ([25, 5, 40, 21], 100, [0, 30, 70, 10, 40, 80, 50], "documents", [0, 2, 3, 0, 2, 3, 2]),
        # Few windows are of many documents.
        ([25, 5, 40, 21], 3, [0, 30, 70], "documents", [0, 2, 3]),
        # Those of a single document are units themselves.
        ([35, 4], 100, [0, 10, 20], "windows", [0, 1, 2]),
        ([8, 9, 10], 100, [0, 10], "windows", [0, 1]),  # short documents are laid end to end
    ],
)
def test_windows_lie_within_documents_where_they_fit(lengths, most, begins, unit, units) -> None:
    windows = held_out_windows(*corpus(lengths), window=10, most=most)
    assert (windows.unit, windows.units.tolist()) == (unit, units)
    assert torch.equal(windows.tokens, torch.tensor(begins)[:, None] + torch.arange(11))


def test_held_out_text_shorter_than_a_window_is_refused() -> None:
    cache, held_out = corpus([8])
    with pytest.raises(UserError, match="8 tokens are fewer than the 11"):
        held_out_windows(cache, held_out, window=10, most=100)


class Watched(Decoder):
    """A model that predicts nothing, and notes what it read."""

    def __init__(self, vocab_size: int = 200) -> None:
        super().__init__(
            DecoderConfig.of_size("demo", vocab_size=vocab_size, context=64), attention="sdpa"
        )
        self.read: list[list[int]] = []

    def token_losses(self, tokens, labels, **_):
        self.read += tokens.tolist()
        return labels.float()  # a token's loss is its id, which tells where it stands


@pytest.fixture
def windows() -> torch.Tensor:
    # Two windows of 32 tokens and a label.
    return torch.arange(0, 33)[None] + torch.tensor([[0], [100]])


def test_every_context_is_asked_about_the_same_tokens(windows) -> None:
    for context in (8, 16, 32):
        for stride in (None, 1, 3, 8):
            losses = score_windows(Watched(), windows, context=context, scored=8, stride=stride)
            assert np.array_equal(losses, windows[:, -8:]), (context, stride)


def test_the_scored_tokens_are_each_windows_last() -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.of_size("demo", vocab_size=50, context=32), attention="sdpa")
    windows = torch.randint(0, 50, (3, 33))
    losses = score_windows(model, windows, context=32, scored=8)
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(
            model(windows[:, :-1]).transpose(1, 2), windows[:, 1:], reduction="none"
        )
    np.testing.assert_allclose(losses, whole[:, -8:], atol=1e-5)


@pytest.mark.parametrize(
    ("context", "stride", "read"),
    [
        (12, None, [range(20, 32)]),  # the context's last tokens, once
        (12, 4, [range(16, 28), range(20, 32)]),  # nearly the whole context for every token
        (32, 4, [range(32)]),  # not before the window's beginning: all is in one reading
    ],
)
def test_what_is_read_ends_with_what_is_asked(windows, context, stride, read) -> None:
    model = Watched()
    score_windows(model, windows[:1], context=context, scored=8, stride=stride)
    assert sorted(model.read) == [list(tokens) for tokens in read]


def test_dropout_is_off() -> None:
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig.of_size("demo", vocab_size=50, context=16, dropout=0.5), attention="sdpa"
    )
    windows = torch.randint(0, 50, (2, 17))
    first, second = (score_windows(model.train(), windows, context=16, scored=4) for _ in range(2))
    assert np.array_equal(first, second)
