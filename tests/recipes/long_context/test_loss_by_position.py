"""Loss by position: what the text before a token helps to predict it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flashtrain.command import modes
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.data.packing import Spans
from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.report.rows import read_result
from flashtrain_recipes.loss_by_position.run import (
    behind_another,
    document_losses,
    position_rows,
    whole_documents,
)


def test_a_documents_losses_are_those_of_its_logits() -> None:
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig.of_size("demo", vocab_size=50, context=24), attention="sdpa"
    ).eval()
    documents = torch.randint(0, 50, (3, 25))
    expected = F.cross_entropy(
        model(documents[:, :-1]).transpose(1, 2), documents[:, 1:], reduction="none"
    )
    np.testing.assert_allclose(document_losses(model, documents), expected.detach(), atol=1e-5)


def test_the_control_keeps_the_second_half_behind_the_next_documents_first() -> None:
    documents = torch.arange(30).reshape(3, 10)
    assert behind_another(documents)[0].tolist() == [10, 11, 12, 13, 14, 5, 6, 7, 8, 9]
    assert behind_another(documents)[2].tolist() == [0, 1, 2, 3, 4, 25, 26, 27, 28, 29]


def test_only_documents_that_are_long_enough_are_scored_from_their_beginnings() -> None:
    tokens, begins = np.arange(100, dtype=np.uint16), np.array([0, 30, 40, 70])
    spans = Spans(begins, np.array([30, 40, 70, 100]))
    assert whole_documents(tokens, spans, length=20, at_least=21, most=9)[:, 0].tolist() == [
        0,
        40,
        70,
    ]
    assert whole_documents(tokens, spans, length=5, at_least=21, most=2).shape == (2, 6)
    with pytest.raises(UserError, match=r"0 held-out documents have 31 tokens"):
        whole_documents(tokens, spans, length=30, at_least=31, most=9)


def test_ranges_double_and_the_second_half_has_the_gain_of_the_first() -> None:
    drawn = np.random.default_rng(0)
    losses = drawn.uniform(1, 2, (6, 1024))
    control = losses + np.linspace(0.4, 0.6, 6)[:, None]
    rows = position_rows(losses, control, seed=0)
    assert [(row["begin"], row["end"]) for row in rows] == [(0, 256), (256, 512), (512, 1024)]
    assert [row["loss"] for row in rows] == [
        pytest.approx(losses[:, row["begin"] : row["end"]].mean()) for row in rows
    ]
    first, last = rows[0], rows[-1]
    assert "gain" not in first
    assert last["gain"] == pytest.approx(0.5)
    assert 0.4 < last["gain_low"] < 0.5 < last["gain_high"] < 0.6


def test_the_mode_leaves_a_table_rows_and_a_figure(trained, capsys) -> None:
    words = (f"checkpoint={trained}", "positions.length=30", "positions.documents=2")
    settings = settings_from_checkpoint(["mode=positions", *words])
    assert settings is not None
    assert modes.run_mode(settings) == 0
    assert "behind another document's first half" in capsys.readouterr().out
    result = read_result(trained / "positions" / "result.json")
    assert [(row["begin"], row["end"], row["documents"]) for row in result.rows] == [
        (0, 15, 2),
        (15, 30, 2),
    ]
    assert (trained / "positions" / "positions.png").is_file()
    words = {"mode=positions", f"checkpoint={trained}", "positions.length=30"}
    assert words < {*result.command.split()}
