"""Whatever goes wrong is one line: a mistake alone, anything else with the
place of its traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
from tiny_runs import TinyRuns

from flashtrain import __main__ as command
from flashtrain import registry
from flashtrain.errors import RunFailed, UserError
from flashtrain.training.out_of_memory import OutOfMemory


@pytest.fixture
def fails(monkeypatch, tmp_path: Path, capsys):
    """main() where its work raises this exception; (exit status, what it prints
    on standard error)."""
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["flashtrain", "recipe=gpt2"])

    def run(error: BaseException) -> tuple[int, str]:
        def work(words: list[str]) -> int:
            raise error

        monkeypatch.setattr(command, "_command", work)
        with pytest.raises(SystemExit) as end:
            command.main()
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("a mistake"), 2, "a mistake"),
        (RunFailed("rank 1 was killed"), 1, "rank 1 was killed"),
        (OutOfMemory("too large"), 3, "too large"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_the_user_can_know_is_a_plain_line(
    fails, tmp_path: Path, error, status: int, line: str
) -> None:
    assert fails(error) == (status, f"flashtrain: {line}\n")
    assert not (tmp_path / "cache").exists()


def test_anything_else_names_its_type_and_the_file_with_its_traceback(
    fails, tmp_path: Path
) -> None:
    log = tmp_path / "cache" / "flashtrain.log"
    assert fails(KeyError("two\nlines")) == (
        1,
        f"flashtrain: KeyError: 'two\\nlines'; details in {log}\n",
    )
    assert "Traceback (most recent call last)" in log.read_text()


def test_where_no_file_can_be_written_the_traceback_is_printed(fails, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    status, said = fails(KeyError("one"))
    assert status == 1
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1] == "flashtrain: KeyError: 'one'; details in the lines above"


class Fails(pl.Callback):
    def on_train_batch_end(self, *_: object) -> None:
        raise ZeroDivisionError("of a callback")


def test_a_run_that_breaks_off_names_the_log_in_its_folder(
    tiny_runs: TinyRuns, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(registry._components["callback"], "fails", lambda _: Fails())
    status, folder = tiny_runs.run("breaks-off", "trainer.callbacks=[fails]")
    assert status == 1
    log = folder / "flashtrain.log"
    assert (
        f"flashtrain: ZeroDivisionError: of a callback; details in {log}\n"
        in capsys.readouterr().err
    )
    assert "Traceback (most recent call last)" in log.read_text()
    assert (
        json.loads((folder / "summary.json").read_text())["error"]
        == "ZeroDivisionError: of a callback"
    )
