"""The page of transformers' types says of each what the code does; other pages give its number."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
import transformers
from published_commands import ROOT

PAGE = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in PAGE,
    reason="the page is of another release of transformers",
)


@pytest.fixture(scope="module")
def census() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import census
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return census


def as_found(census: ModuleType, kind: str) -> None:
    found = census.find(kind)
    assert found.faults == ()
    (line,) = [one for one in PAGE.splitlines() if f"`{kind}`" in one]
    assert line.startswith(f"| {found.cells} | ")


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "cohere2", "dbrx", "gpt_neox", "moshi", "qwen3_5_text", "mamba2", "minimax"),
        *("bert", "bloom", "bart", "doge", "gemma4_text", "qwen3_5", "longcat_flash", "xlstm"),
        *("gemma3n_text", "xmod", "blt", "gemma4_assistant"),
    ],
)
def test_a_type_stands_on_the_page_as_it_is_found(census: ModuleType, kind: str) -> None:
    as_found(census, kind)


def test_a_question_that_cannot_be_asked_and_an_unknown_failure_are_faults(
    census: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = census.flashtrain.checks.questions.Row("declared", "-", "it fails")
    monkeypatch.setattr(census.flashtrain, "check", lambda model: [row])
    assert census.find("llama").faults == ("declared",)
    monkeypatch.setattr(census, "built", lambda kind: 1 / 0)
    assert census.find("llama").faults == ("division by zero",)


@pytest.mark.slow
def test_every_type_stands_on_the_page_as_it_is_found(census: ModuleType) -> None:
    for kind in census.TYPES:
        as_found(census, kind)


def test_other_pages_give_the_pages_number_of_types() -> None:
    given = re.search(r"has (\d+) types .*\. (\d+) of them are trained", PAGE)
    text = (ROOT / "docs" / "train" / "hugging-face.md").read_text(encoding="utf-8")
    assert given is not None
    assert f"{given[2]} of {given[1]} are trained" in text
