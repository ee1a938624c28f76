"""The command as a user types it: python -m flashtrain, in a process of its own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import TinyRuns, checkout_environment, flashtrain_command, wait_for

from flashtrain.command.command_help import examples, help_text
from flashtrain.command.overrides import plain_words
from flashtrain.command.request import settings_of
from flashtrain.command.sweep import run_sweep
from flashtrain.errors import UserError
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.settings import mode_names


def test_help_lists_the_recipes_with_a_line_each(tmp_path) -> None:
    done = flashtrain_command("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "recipe=gpt2" in done.stdout
    assert "GPT-2 124M on the source code" in done.stdout


def test_help_has_the_recipes_that_train_language_models_first() -> None:
    """As they compose (tests/contract/test_composed.py)."""
    written = Path(__file__).parents[1] / "contract" / "composed.json"
    recipes = json.loads(written.read_text())["recipes"]
    trained = [
        name
        for name, values in recipes.items()
        if values["task"] == "language_model" and values.get("mode") != "benchmark"
    ]
    lines = help_text().partition("Recipes\n")[2].partition("\n\n")[0].splitlines()
    first = [line.split()[0].removeprefix("recipe=") for line in lines]
    assert first == [*trained, *(name for name in recipes if name not in trained)]


def test_help_has_an_example_of_every_mode_that_is_taken_as_it_stands() -> None:
    assert set(examples()) == set(mode_names())
    for mode, (example, _) in examples().items():
        assert f"  {mode:<10} python -m flashtrain {example}\n" in help_text()
        words = plain_words(shlex.split(example))
        assert any(word.startswith(("recipe=", "checkpoint=")) for word in words)
        if "checkpoint=RUN" not in words:
            assert settings_of(words).mode == mode


def test_a_missing_file_is_one_line_and_leaves_a_row_that_reports_it(
    tiny_runs: TinyRuns, capfd
) -> None:
    status, folder = tiny_runs.run("missing-file", "data.path=nowhere.txt")
    assert status == 2
    line = capfd.readouterr().err
    assert line.startswith("flashtrain: ")
    assert "nowhere.txt" in line
    assert line.count("\n") == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


@pytest.mark.integration
def test_a_refused_command_leaves_no_folder_of_a_run(tiny_runs: TinyRuns, tmp_path: Path) -> None:
    done = tiny_runs.command("data.path=nowhere.txt", f"output={tmp_path / 'runs'}")
    assert done.returncode == 2
    assert "nowhere.txt" in done.stderr
    assert not list((tmp_path / "runs").glob("*/*"))


def test_a_run_says_what_it_trains_and_ends_with_a_summary_a_sample_and_the_next_command(
    tiny_runs: TinyRuns, tmp_path
) -> None:
    done = tiny_runs.command(f"output='{tmp_path}/my runs (1)'")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("my runs (1)/gpt2/*/summary.json"))
    for part in (
        "gpt2-demo",
        "sample",
        "tokens/s",
        "checkpoints",
        "try next: python -m flashtrain mode=generate",
    ):
        assert part in done.stdout, part
    assert "124M" not in done.stdout


@pytest.mark.integration
def test_a_sweep_ends_with_a_table_and_a_figure_and_goes_on_past_a_job_that_fails(
    tiny_runs: TinyRuns, tmp_path
) -> None:
    step = ("trainer.tokens_per_step=16384", "trainer.micro_batch=null", "trainer.steps=1")
    done = tiny_runs.command("-m", "context=16384,64", *step, f"output={tmp_path}")
    assert done.returncode == 1, done.stdout + done.stderr
    (folder,) = (tmp_path / "gpt2-sweep").iterdir()
    rows = [json.loads((folder / job / "summary.json").read_text()) for job in ("00", "01")]
    assert [row["status"] for row in rows] == ["failed", "finished"]
    assert "16384" in rows[0]["error"]
    assert {"sweep.md", "sweep.png"} <= {path.name for path in folder.iterdir()}


def test_a_sweep_with_a_mistake_in_it_starts_nothing(tiny_runs: TinyRuns, tmp_path) -> None:
    with pytest.raises(UserError, match="must be a multiple of context=33"):
        run_sweep(CommandLine(tiny_runs.settings_words("context=32,33", f"output={tmp_path}")))
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes as Linux has them")
def test_the_ranks_that_lightning_starts_end_with_the_first_one(
    tiny_runs: TinyRuns, tmp_path
) -> None:
    words = tiny_runs.settings_words(
        "trainer.devices=2", "trainer.strategy=ddp", f"output={tmp_path}"
    )
    first = subprocess.Popen(
        [sys.executable, "-m", "flashtrain", *words],
        env=checkout_environment(),
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
    rank: list[str] = []

    def starts() -> bool:
        for process in children.read_text().split():
            if b"flashtrain" in Path(f"/proc/{process}/cmdline").read_bytes():
                rank.append(process)
        return bool(rank)

    assert wait_for(starts)
    first.kill()  # before the ranks have met
    first.wait()
    assert wait_for(lambda: not Path(f"/proc/{rank[0]}").exists())


def test_cfg_job_shows_every_setting_of_a_recipe(tiny_runs) -> None:
    done = tiny_runs.command("recipe=gpt2", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "recipe: gpt2\n" in done.stdout
    assert "\ngenerate:\n  max_new_tokens: 8\n" in done.stdout
