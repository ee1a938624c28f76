"""Data settings that the chosen source or tokenizer would pass over in silence are refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import write_config
from flashtrain.run.machine import adapt_to_machine, apply_demo
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.data import DataSettings
from flashtrain.tasks.text_data import make_source

FILES = ["data=files", "data.path=BOOKS"]
HUB = ["data=hub", "data.name=someone/something"]
LONGER = "data.length_weights=[{at_least:9,weight:2}]"
GPT2 = ["data.vocab=v.json", "data.merges=m.txt"]


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["data.path=BOOKS"], "data.path=BOOKS .* Add data=files, or remove data.path"),
        (["data.name=x"], "data.name=x"),
        (["data.mixture={a: {path: b}}"], "data.mixture="),
        ([*FILES, "+data.options.depth=3"], "data.options="),
        ([*HUB, "data.path=BOOKS"], "data.path=BOOKS"),
        (GPT2, "data.vocab=v.json"),
        (
            [*FILES, "data.encoding=latin-one"],
            r"unknown data\.encoding 'latin-one'\. Did you mean .*'latin-1'",
        ),
        (
            [*FILES, "data.streaming=true", "data.tokenizer=bytes", LONGER],
            "data.length_weights needs .* data=files data.streaming=true has not",
        ),
        (["data.length_weights=[{at_least:9,weight:-1}]"], "data.length_weights.weight=-1"),
        ([*FILES, "data.encoding_errors=replaced"], "unknown data.encoding_errors 'replaced'"),
    ],
)
def test_what_would_be_passed_over_is_refused_before_any_work(
    words: list[str], setting: str
) -> None:
    with pytest.raises(UserError, match=setting):
        compose_settings(["recipe=gpt2", *words])


@pytest.mark.parametrize(
    "words",
    [
        [*FILES, "data.encoding=cp1252", "data.encoding_errors=replace", "data.text_column=body"],
        [*HUB, "data.streaming=false", "data.split=test", *GPT2],
        ["data.include_tests=false", "data.tokenizer=bytes"],
        [*FILES, "data.include_tests=false"],  # as commands of published results have it
        [*FILES, "data.tokenizer=gpt2", *GPT2],
        [*FILES, "data.tokenizer=bytes", LONGER],
    ],
)
def test_what_is_read_is_not(words: list[str]) -> None:
    words = ["recipe=gpt2", *words]
    apply_demo(compose_settings(words), CommandLine(words).by_name)


@pytest.mark.parametrize("recipe", ["gpt2", "gpt2-long", "bert", "bert-speed"])
def test_a_demo_for_the_standard_library_goes_with_other_text(recipe) -> None:
    words = [f"recipe={recipe}", *FILES]
    assert apply_demo(compose_settings(words), CommandLine(words).by_name).data.path == "BOOKS"


def test_an_evaluation_on_another_source_forgets_what_the_run_was_given_of_its_own(
    tmp_path,
) -> None:
    settings = compose_settings(["recipe=gpt2", *HUB, "data.config=en", "data.text_column=body"])
    write_config(asdict(settings), tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.ckpt").touch()
    settings = settings_from_checkpoint(["mode=evaluate", f"checkpoint={tmp_path}", *FILES])
    assert settings is not None
    data = settings.data
    assert (data.path, data.name, data.config, data.text_column) == ("BOOKS", None, None, "body")


def test_a_source_of_your_own_may_read_any() -> None:
    DataSettings(source="mine", path="x", name="y", include_tests=False, options={"a": 1}).check()


def test_the_encoding_reaches_the_files_of_a_mixture_too(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    parts = f"data.mixture={{one: {{path: {tmp_path}, encoding_errors: replace}}}}"
    mixture = make_source(compose_settings(["recipe=gpt2", "data=mixture", parts]).data)
    assert list(next(iter(mixture.sources.values())).documents()) == ["\ufffd"]


@pytest.mark.parametrize("mode", ["plan", "train"])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["recipe=sft", "model.config=tiny", "data.chat_template=chatml"],
            r"data.chat_template=chatml: expected the name of a file of Jinja; without it",
        ),
        (["recipe=gpt2", "data.tokenizer=gpt2", *GPT2], "data.vocab=v.json: expected the name of"),
        (["recipe=bert", "data.tokenizer=gpt2", *GPT2], "data.vocab=v.json: expected the name of"),
    ],
)
def test_a_setting_that_names_no_file_is_refused_before_a_plan_and_before_a_run_has_a_folder(
    words: list[str], line: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "recipe=sft" in words:
        words = [*words, "data.path=chats.jsonl", f"data.tokenizer={tmp_path}"]
    settings = compose_settings([*words, f"mode={mode}", "hardware=cpu", "hardware.demo=never"])
    with pytest.raises(UserError, match=line):
        adapt_to_machine(settings, CommandLine.of(words))
    assert not list(tmp_path.iterdir())
