"""What a run has survives a command that continues it, or the command says what it replaces."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from jobs import run_job
from tiny_runs import TinyRuns, made_once

from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.folders.run_folder import RUNNING, read_summary, words_of_run, write_summary
from flashtrain.report.rows import collect_summaries
from flashtrain.report.sweep import varied_keys, with_overrides
from flashtrain.settings.command_line import CommandLine

pytestmark = pytest.mark.integration  # whole runs


def continued(folder: Path, *words: str, checkpoint: str = "") -> int:
    """Run `resume=FOLDER words`, as a command without a recipe, and return its exit status."""
    line = CommandLine([f"resume={folder / checkpoint}", *words])
    started = time.monotonic()
    return run_job(settings_from_checkpoint(line), folder, overrides=line, started=started)


@pytest.fixture
def ended_early(tiny_runs: TinyRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps whose validations no longer improved after the third."""

    def make(place: Path) -> Path:
        # A rate that moves no weight by what float32 can show. Its only checkpoint is of its end,
        # after the validation.
        words = ("trainer.early_stopping_patience=2", "trainer.validate_every=1")
        words += ("trainer.checkpoint_every=100",)
        return tiny_runs.finished(place, *words, "optimizer.learning_rate=1e-30")

    return made_once(tmp_path_factory, "ended-early", make)


def test_a_run_that_ended_early_is_refused_as_a_finished_one_and_keeps_its_row(
    ended_early: Path, capsys
) -> None:
    row = read_summary(ended_early)
    assert row["steps"] == 3
    assert row["stopped_early"]
    files = ("config.yaml", "summary.json", "metrics.jsonl", "checkpoints/last.ckpt")
    before = {name: (ended_early / name).read_bytes() for name in files}
    for words in ([], ["trainer.steps=9"], ["trainer.early_stopping_patience=1"]):
        assert continued(ended_early, *words) == 2
        assert "trainer.early_stopping_patience above" in capsys.readouterr().err
    assert {name: (ended_early / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(("patience", "steps"), [("4", 5), ("null", 6)])
def test_a_run_that_ended_early_goes_on_with_more_patience(
    ended_early: Path, patience: str, steps: int
) -> None:
    assert continued(ended_early, f"trainer.early_stopping_patience={patience}") == 0
    row = read_summary(ended_early)
    assert row["steps"] == steps
    assert row["validation_loss"]
    assert row["tokens_per_second"]


def test_a_run_that_was_killed_after_its_early_end_makes_its_summary(ended_early: Path) -> None:
    row = read_summary(ended_early)
    write_summary(ended_early, {**row, "status": RUNNING, "validation_loss": None})
    assert continued(ended_early) == 0
    again = read_summary(ended_early)
    for name in ("status", "steps", "validation_loss", "stopped_early"):
        assert again[name] == row[name], name


def test_a_run_that_goes_back_to_an_earlier_checkpoint_says_what_is_replaced(
    tiny_runs: TinyRuns, tmp_path: Path, caplog
) -> None:
    _, folder = tiny_runs.run("kept", "trainer.keep_checkpoints=1")
    (earlier,) = (folder / "checkpoints").glob("step-*.ckpt")
    kept = shutil.copytree(folder, tmp_path / "kept")
    caplog.set_level("INFO")
    assert continued(kept, "trainer.steps=7", checkpoint=f"checkpoints/{earlier.name}") == 0
    (said,) = [line for line in caplog.messages if line.startswith("resuming from ")]
    assert "at step 3 of 7: later metrics, checkpoints and the summary are replaced" in said
    assert "had finished" not in said  # which the run had, and this step had not


def test_the_last_checkpoint_replaces_nothing(trained: Path, tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    assert continued(shutil.copytree(trained, tmp_path / "longer"), "trainer.steps=7") == 0
    assert "had finished, at step 6 of 7" in caplog.text
    assert "replaced" not in caplog.text


def test_a_continued_run_is_compared_by_the_settings_that_it_began_with(
    trained: Path, tmp_path: Path
) -> None:
    first = shutil.copytree(trained, tmp_path / "runs" / "first")
    longer = shutil.copytree(trained, tmp_path / "runs" / "longer")
    began = read_summary(trained)["overrides"].split()
    assert continued(longer, "trainer.steps=7") == 0
    words = read_summary(longer)["overrides"].split()
    assert sorted(words) == sorted({*began, "trainer.steps=7"} - {"trainer.steps=6"})
    rows = with_overrides(collect_summaries(first.parent))
    assert varied_keys(rows) == ["trainer.steps"]
    assert len({row["data.path"] for row in rows}) == 1


def test_of_a_word_that_is_given_again_the_later_value_holds(tmp_path: Path) -> None:
    write_summary(tmp_path, {"overrides": "recipe=gpt2 data=files trainer.steps=60"})
    line = [f"resume={tmp_path}", "trainer.steps=80"]
    assert words_of_run(tmp_path, line) == ["recipe=gpt2", "data=files", "trainer.steps=80"]
