"""What one command does once, and what it leaves where it cannot run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from tiny_runs import TinyRuns

from flashtrain.__main__ import main
from flashtrain.command.request import settings_of
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.logger import LoggerSettings


def status_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status of the command with these words, in this process."""
    monkeypatch.setattr(sys, "argv", ["flashtrain", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules of flashtrain that had words parsed by Hydra's grammar, once for each time."""
    found, parse = [], OverridesParser.parse_overrides

    def counted(self: OverridesParser, overrides: list[str]) -> object:
        found.append(sys._getframe(1).f_globals["__name__"])
        return parse(self, overrides)

    monkeypatch.setattr(OverridesParser, "parse_overrides", counted)
    return found


def test_a_run_parses_its_words_once_and_adapts_to_its_machine_once(
    tiny_runs: TinyRuns, tmp_path: Path, parses: list[str], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    adapted, check = [], LoggerSettings.check_installed
    monkeypatch.setattr(
        LoggerSettings, "check_installed", lambda own: adapted.append(own) or check(own)
    )
    words = tiny_runs.settings_words(
        "trainer.steps=1", "hardware.demo=always", f"output={tmp_path}"
    )
    with caplog.at_level("INFO", "flashtrain"):
        assert status_of(words, monkeypatch) == 0
    # Hydra composes from words alone, and parses them for itself.
    assert [one for one in parses if one.startswith("flashtrain")] == [
        "flashtrain.settings.command_line"
    ]
    assert len(adapted) == 1
    (folder,) = (tmp_path / "gpt2").iterdir()
    assert "small demo" in (folder / "flashtrain.log").read_text()  # as the lines of the run itself


def test_a_command_line_that_is_passed_on_is_the_same_one(parses: list[str]) -> None:
    line = CommandLine(["recipe=gpt2", "++trainer.steps=7"])
    assert CommandLine.of(line) is line
    assert settings_of(line).trainer.steps == 7
    assert line.by_name.keys() == line.values.keys() == {"recipe", "trainer.steps"}
    assert parses.count("flashtrain.settings.command_line") == 1


@pytest.mark.parametrize(
    "word", ["weights=/nowhere", "trainer.nodes=2", "context=33", "resume=/nowhere"]
)
def test_a_command_that_cannot_run_here_leaves_no_folder(
    word: str, tiny_runs: TinyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_of(tiny_runs.settings_words(word, f"output={tmp_path}"), monkeypatch) == 2
    assert not list(tmp_path.iterdir())
