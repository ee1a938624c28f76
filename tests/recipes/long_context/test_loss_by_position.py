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
from flashtrain.report.rows import read_result, write_result
from flashtrain_recipes.long_context.evaluate import document_losses
from flashtrain_recipes.loss_by_position import run
from flashtrain_recipes.loss_by_position.run import (
    behind_another,
    check_same,
    differences,
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


@pytest.mark.parametrize("stride", [None, 4, 5, 99])
def test_a_shorter_context_moves_on_by_the_stride(stride: int | None) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.of_size("demo", vocab_size=50, context=8), attention="sdpa")
    documents = torch.randint(0, 50, (2, 22))
    found = document_losses(model.eval(), documents, context=8, stride=stride)
    step = min(stride or 8, 8)
    for place in range(21):  # label `place` is read first where a window ends at or behind it
        end = next(one for one in (*range(8, 21, step), 21) if one > place)
        logits = model(documents[:, end - 8 : end])[:, place - end]
        expected = F.cross_entropy(logits, documents[:, place + 1], reduction="none")
        np.testing.assert_allclose(found[:, place], expected.detach(), atol=1e-5)


def test_two_models_are_compared_on_the_same_documents_in_pairs() -> None:
    hard = np.random.default_rng(0).uniform(1, 5, (9, 1))  # documents differ more than models do
    better, worse = (np.tile(hard + less, (1, 512)) for less in (0.0, 0.02))
    rows, others = (
        [{**row, "text": 7} for row in position_rows(one, one, seed=0)] for one in (better, worse)
    )
    for row in differences(rows, others, seed=0):
        assert row["difference"] == pytest.approx(-0.02, abs=1e-4)
        assert row["difference_low"] < row["difference_high"] < 0
    check_same(others, 7, 512)
    for unlike in ([{**row, "text": 8} for row in others], others[:1], [{"position": "0 to 256"}]):
        with pytest.raises(UserError, match=r"positions\.against"):
            check_same(unlike, 7, 512)


@pytest.mark.parametrize("wrong", ["missing", "of another kind", "of other documents"])
def test_what_cannot_be_compared_is_refused_before_anything_is_scored(
    wrong, trained, tmp_path, monkeypatch
) -> None:
    against = tmp_path / "result.json"
    if wrong == "of another kind":
        against.write_text("{}")
    elif wrong == "of other documents":
        rows = position_rows(np.ones((2, 30)), np.ones((2, 30)), seed=0)
        write_result(against, "gpt2", "", [{**row, "text": 7} for row in rows])
    monkeypatch.setattr(run, "document_losses", lambda *_, **__: pytest.fail("scored"))
    words = ("positions.length=30", "positions.documents=2", f"positions.against={against}")
    settings = settings_from_checkpoint(["mode=positions", f"checkpoint={trained}", *words])
    with pytest.raises(UserError, match=r"positions\.against"):
        modes.run_mode(settings)
    if wrong == "of other documents":
        return
    monkeypatch.setattr(run, "read_model", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(UserError, match=r"positions\.against"):
        modes.run_mode(settings)


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


def test_models_of_several_contexts_are_lines_of_their_own(monkeypatch, tmp_path) -> None:
    drawn = {}
    monkeypatch.setattr(
        run, "line_figure", lambda rows, x, y, groups, *_, **__: drawn.update(of=groups)
    )
    rows = position_rows(np.ones((3, 512)), np.ones((3, 512)), seed=0)
    both = [{**row, "model": "gpt2", "context": context} for row in rows for context in (256, 512)]
    run.positions_figure(both, tmp_path / "positions.png")
    assert drawn["of"] == ("context", "series")
    run.positions_figure(both[::2], tmp_path / "positions.png")
    assert drawn["of"] == ("series",)


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


def test_a_model_of_a_shorter_context_is_scored_on_longer_documents(trained, capsys) -> None:
    words = ["mode=positions", f"checkpoint={trained}", "positions.documents=2"]
    for more in (["positions.length=60"], ["positions.length=60", "positions.stride=16"]):
        settings = settings_from_checkpoint([*words, *more])
        if len(more) == 1:
            with pytest.raises(UserError):
                modes.run_mode(settings)
    assert modes.run_mode(settings) == 0
    (first,) = sorted(trained.glob("positions*/result.json"), key=lambda one: one.stat().st_mtime)[
        -1:
    ]
    assert read_result(first).rows[-1]["end"] == 60
    settings = settings_from_checkpoint([*words, *more, f"positions.against={first}"])
    assert modes.run_mode(settings) == 0
    (again,) = sorted(trained.glob("positions*/result.json"), key=lambda one: one.stat().st_mtime)[
        -1:
    ]
    assert [row["difference"] for row in read_result(again).rows] == [0.0] * 2
