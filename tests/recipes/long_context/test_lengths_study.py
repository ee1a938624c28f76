"""mode=lengths as a whole: each context is trained once, and all are scored on the same tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from jobs import run_job
from tiny_runs import TinyRuns

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_settings, write_summary
from flashtrain.report.rows import read_result
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain_recipes.context_study import run_study, study_plan

pytestmark = pytest.mark.integration  # whole runs

LENGTHS = (
    "mode=lengths",
    "resume=auto",
    "lengths.contexts=[16,64]",
    "lengths.scored=8",
    "lengths.stride=4",
    "trainer.steps=2",
)


class InThisProcess:
    """Stands in for a process of its own: runs the training's words here, and notes them."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []

    def __call__(self, words: list[str]) -> int:
        self.words.append(words)
        told = dict(word.split("=", 1) for word in words)
        folder = Path(told["hydra.run.dir"].strip("'"))
        plain = [word for word in words if not word.startswith("hydra.")]
        return run_job(compose_settings(plain), folder, overrides=plain, started=time.monotonic())

    @property
    def contexts(self) -> list[str]:
        return [word for words in self.words for word in words if word.startswith("context=")]


def compare(tiny_runs: TinyRuns, folder, *extra: str, start=None) -> tuple[int, InThisProcess]:
    without = [
        word
        for word in tiny_runs.words
        if not word.startswith(("context=", "trainer.micro_batch="))
    ]
    words = TinyRuns(tiny_runs.folder, without).settings_words(*LENGTHS, f"output={folder}", *extra)
    words = list({word.split("=", 1)[0]: word for word in words}.values())
    runner = start or InThisProcess()
    return run_study(
        compose_settings(words), CommandLine(words), started=time.monotonic(), start=runner
    ), runner


@pytest.fixture(scope="module")
def finished(tiny_runs: TinyRuns, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    status, runner = compare(tiny_runs, folder)
    assert status == 0
    (study,) = (folder / "gpt2").iterdir()
    return folder, study, runner


def test_each_context_is_trained_on_the_same_tokens_and_split(finished) -> None:
    _, study, runner = finished
    assert runner.contexts == ["context=16", "context=64"]
    trained = [read_settings(study / f"context-{context}") for context in (16, 64)]
    assert [settings.mode for settings in trained] == ["train", "train"]
    assert {settings.data.split_context for settings in trained} == {64}
    summaries = [
        json.loads((study / f"context-{c}" / "summary.json").read_text()) for c in (16, 64)
    ]
    assert len({summary["tokens"] for summary in summaries}) == 1


def test_it_leaves_rows_a_summary_and_two_figures(finished) -> None:
    _, study, _ = finished
    assert {"config.yaml", "summary.json", "result.json", "lengths.png"} <= {
        path.name for path in study.iterdir()
    }
    result = read_result(study / "result.json")
    lengths = [row for row in result.rows if row["part"] == "lengths"]
    assert [row["context"] for row in lengths] == [16, 64]
    assert all(
        row["perplexity_low"] <= row["perplexity"] <= row["perplexity_high"] for row in lengths
    )
    assert len({row["scored_tokens"] for row in lengths}) == 1
    assert lengths[0]["time_ratio"] == 1
    assert "mode=lengths" in result.command
    assert "output" not in result.command
    summary = json.loads((study / "summary.json").read_text())
    assert (summary["status"], summary["contexts"]) == ("finished", "16 64")
    assert summary["best_context"] in (16, 64)


def test_what_is_finished_is_not_trained_again_and_a_new_length_joins_it(
    finished, tiny_runs: TinyRuns, capsys, caplog
) -> None:
    folder, study, _ = finished
    with caplog.at_level("INFO"):
        status, runner = compare(tiny_runs, folder, "lengths.contexts=[32]", "lengths.window=64")
    assert (status, runner.contexts) == (0, ["context=32"])
    assert [path.name for path in (folder / "gpt2").iterdir()] == [study.name]
    result = read_result(study / "result.json")
    assert [row["context"] for row in result.rows if row["part"] == "lengths"] == [16, 32, 64]
    assert "'lengths.contexts=[16,32,64]'" in result.command
    caplog.clear()
    with caplog.at_level("INFO"):
        status, runner = compare(tiny_runs, folder)
    assert (status, runner.words) == (0, [])
    assert "context 16: trained already" in caplog.text
    assert "held-out tokens in" in capsys.readouterr().out


def test_other_settings_or_a_wish_to_start_anew_are_another_comparison(
    finished, tiny_runs: TinyRuns
) -> None:
    folder, study, _ = finished
    stopped = lambda words: 130  # noqa: E731
    for extra in (("trainer.steps=3",), ("attention=standard",), ("resume=null",)):
        before = set((folder / "gpt2").iterdir())
        assert compare(tiny_runs, folder, *extra, start=stopped)[0] == 130
        (new,) = set((folder / "gpt2").iterdir()) - before
        assert json.loads((new / "summary.json").read_text())["status"] == "stopped"
    with pytest.raises(UserError, match="is no comparison of these settings"):
        compare(tiny_runs, folder, "trainer.steps=4", f"resume={study}")


@pytest.mark.parametrize(("how", "study_status"), [("failed", 1), ("out of memory", 0)])
def test_a_length_that_fails_is_a_row_and_the_others_go_on(
    tiny_runs: TinyRuns, tmp_path, how, study_status
) -> None:
    class FailsAt16(InThisProcess):
        def __call__(self, words):
            if "context=16" not in words:
                return super().__call__(words)
            if how == "out of memory":
                folder = Path(
                    dict(word.split("=", 1) for word in words)["hydra.run.dir"].strip("'")
                )
                write_summary(folder, {"status": how, "error": "killed by signal 9", "context": 16})
            return -9

    status, _ = compare(tiny_runs, tmp_path, start=FailsAt16())
    assert status == study_status
    (study,) = (tmp_path / "gpt2").iterdir()
    rows = [row for row in read_result(study / "result.json").rows if row["part"] == "lengths"]
    assert (rows[0]["status"], rows[0]["error"]) == (how, "killed by signal 9")
    assert rows[1]["perplexity"] > 1


@pytest.mark.parametrize("status", [130, 143])
def test_a_stopped_training_stops_the_comparison(tiny_runs: TinyRuns, tmp_path, status) -> None:
    assert compare(tiny_runs, tmp_path, start=lambda words: status)[0] == status
    (summary,) = tmp_path.glob("gpt2/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "stopped"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lengths.contexts=[16,16]"], "lengths.contexts"),
        (["lengths.scored=17"], "lengths.scored"),
        (["lengths.window=32"], "lengths.window"),
        (["lengths.stride=9"], "lengths.stride"),
        (["lengths.contexts=[16,48]"], "trainer.tokens_per_step"),
        (["lengths.contexts=null"], "recipe=gpt2-long"),
        (["context=32"], "mode=train"),
        (["lengths.contexts=[8192]", "trainer.tokens_per_step=8192"], "tokens"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(
    tiny_runs: TinyRuns, tmp_path, words, message
) -> None:
    with pytest.raises(UserError, match=message):
        compare(tiny_runs, tmp_path, *words, start=lambda words: pytest.fail("trained"))
    assert not list(tmp_path.iterdir())


def test_plan_describes_every_length_and_starts_nothing(tmp_path) -> None:
    words = [
        "recipe=gpt2-long",
        "mode=plan",
        "hardware=cpu",
        "lengths.contexts=[64,1024]",
        f"output={tmp_path}",
    ]
    text = study_plan(*adapt_to_machine(compose_settings(words), CommandLine(words)))
    assert [line for line in text.splitlines() if line.startswith("===")] == [
        "=== context 64",
        "=== context 1,024",
    ]
    assert not list(tmp_path.iterdir())
