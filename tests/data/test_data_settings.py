"""Data settings that the chosen source or tokenizer does not heed: refused where the user gave them, and only there."""

from __future__ import annotations

import pytest

from flashtrain.command.compose import apply_demo, compose_settings
from flashtrain.errors import UserError
from flashtrain.settings.groups import DataSettings, forget_unheeded
from flashtrain.tasks.components import make_source

FILES = ["data=files", "data.path=BOOKS"]
HUB = ["data=hub", "data.name=someone/something"]
GPT2 = ["data.vocab=v.json", "data.merges=m.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.path=BOOKS"], r"data\.path=BOOKS is for data=files or data=tokens, and this is data=stdlib"),
        (["data.text_column=body"], r"data\.text_column=body is for data=files or data=hub"),
        (["data.name=x"], r"data\.name=x is for data=hub"),
        (["data.encoding=latin-1"], r"data\.encoding=latin-1 is for data=files"),
        ([*FILES, "data.streaming=false"], r"data\.streaming=False is for data=hub, and this is data=files"),
        (["data.split=test"], r"data\.split=test is for data=files or data=hub"),
        ([*FILES, "data.config=en"], r"data\.config=en is for data=hub"),
        ([*FILES, "+data.options.depth=3"], r"data\.options=.* is for data=hub or data=SOURCE, one that a program"),
        ([*HUB, "data.path=BOOKS"], r"data\.path=BOOKS is for data=files or data=tokens, and this is data=hub"),
        ([*HUB, "data.encoding_errors=replace"], r"data\.encoding_errors=replace is for data=files"),
        (["data.tokenizer=bytes", *GPT2], r"data\.vocab=v\.json is for data\.tokenizer=gpt2"),
        ([*FILES, "data.encoding=latin-one"], r"unknown data\.encoding 'latin-one'\. Did you mean .*'latin-1'"),
        (
            [*FILES, "data.encoding_errors=replaced"],
            r"unknown data\.encoding_errors 'replaced'\. Did you mean 'replace'",
        ),
    ],
)
def test_a_setting_that_the_source_does_not_heed_is_refused_before_any_work(words, message) -> None:
    with pytest.raises(UserError, match=message):
        compose_settings(["recipe=gpt2", *words])


@pytest.mark.parametrize(
    "words",
    [
        [*FILES, "data.encoding=cp1252", "data.encoding_errors=replace", "data.text_column=body"],
        [*HUB, "data.streaming=false", "data.split=test", *GPT2],
        ["data.include_tests=false", "data.tokenizer=bytes"],
        [*FILES, "data.include_tests=false"],  # as commands of published results have it
        [*FILES, "data.tokenizer=gpt2", *GPT2],
    ],
)
def test_settings_that_are_heeded_are_not(words) -> None:
    compose_settings(["recipe=gpt2", *words])


@pytest.mark.parametrize("recipe", ["gpt2", "gpt2-long", "bert", "bert-speed"])
def test_a_demo_for_the_standard_library_goes_with_other_text(recipe) -> None:
    words = [f"recipe={recipe}", *FILES]
    assert apply_demo(compose_settings(words), words).data.path == "BOOKS"


def test_what_an_earlier_run_was_told_of_another_source_is_forgotten_unless_given() -> None:
    data = DataSettings(source="files", path="BOOKS", name="x/y", streaming=False)
    forget_unheeded(data, {"data.streaming"})
    assert (data.path, data.name, data.streaming) == ("BOOKS", None, False)
    with pytest.raises(UserError, match=r"data\.streaming=False is for data=hub"):
        data.check()


def test_nobody_knows_what_a_source_of_your_own_heeds() -> None:
    DataSettings(source="mine", path="x", name="y", include_tests=False, options={"a": 1}).check()


def test_the_encoding_reaches_the_files_of_a_mixture_too(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    words = ["recipe=gpt2", "data=files", f"data.path={tmp_path}"]
    assert list(make_source(compose_settings([*words, "data.encoding=latin-1"])).documents()) == ["é"]
    replaced = compose_settings([*words, "data.encoding_errors=replace"])
    assert list(make_source(replaced).documents()) == ["\ufffd"]
    parts = f"data.mixture={{one: {{path: {tmp_path}, encoding_errors: replace}}}}"
    mixture = make_source(compose_settings(["recipe=gpt2", "data=mixture", parts]))
    assert list(mixture.parts[0].source.documents()) == ["\ufffd"]
