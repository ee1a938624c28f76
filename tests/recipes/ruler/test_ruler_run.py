"""mode=ruler on trained models: rows, table, heat map, and going on after a kill."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import run_mode

from flashtrain.command.compose import compose_settings
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.registry import component
from flashtrain.report.rows import read_result
from flashtrain.settings.command_line import CommandLine
from flashtrain_recipes.ruler import run
from flashtrain_recipes.ruler.scores import differences, mean_rows, scored
from flashtrain_recipes.scored_command import scored_command


def row(task: str, scores: str, *, length: int = 4096, prompts: str = "a") -> dict:
    return scored(
        {"length": length, "task": task, "scores": scores, "prompts": prompts, "minutes": 1}
    )


def test_a_task_has_the_mean_of_its_prompts_and_a_bootstrap_interval() -> None:
    known = row("vt", "0 " * 50 + "100 " * 50)  # sqrt(0.25 / 100) = 5 points a standard deviation
    assert known["score"] == 50
    assert known["score_low"] == pytest.approx(50 - 1.96 * 5, abs=1)
    assert known["score_high"] == pytest.approx(50 + 1.96 * 5, abs=1)
    same = row("vt", "25 25 25")
    assert [same[f"score{end}"] for end in ("", "_low", "_high")] == [25, 25, 25]
    alone = row("vt", "25")
    assert [alone[f"score{end}"] for end in ("", "_low", "_high")] == [25, None, None]


def test_the_mean_counts_each_of_rulers_tasks_once_and_no_questions_of_our_own() -> None:
    rows = [row("vt", "100 100"), row("cwe", "0 0"), row("own_qa_1", "100 0")]
    (mean,) = mean_rows(rows)
    assert (mean["task"], mean["tasks"], mean["score"], mean["minutes"]) == ("mean", 2, 50, 2)
    # Tasks do not differ by chance: they are no sample of tasks.
    assert (mean["score_low"], mean["score_high"]) == (50, 50)
    varied = np.random.default_rng(0).integers(0, 2, (11, 100)) * 100
    many = [
        row(task, " ".join(map(str, one))) for task, one in zip(run.TASKS, varied, strict=False)
    ]
    (mean,) = mean_rows(many)
    assert mean["score_high"] - mean["score_low"] == pytest.approx(2 * 1.96 * 5 / 11**0.5, rel=0.15)


def test_a_difference_is_of_pairs_of_the_same_prompts() -> None:
    one = [row("vt", "0 100 0 100"), row("cwe", "50 50 50 50")]
    other = [row("vt", "10 90 10 90"), row("cwe", "40 40 40 40")]
    found = differences([*one, *mean_rows(one)], [*other, *mean_rows(other)])
    assert [(d["task"], d["difference"]) for d in found] == [("vt", 0), ("cwe", 10), ("mean", 5)]
    assert (found[1]["difference_low"], found[1]["difference_high"]) == (10, 10)
    assert found[0]["difference_low"] >= -10  # the scores themselves vary by 100
    assert found[0]["difference_high"] <= 10
    for strange in ([], [row("vt", "0 0 0 0", prompts="b")], [row("vt", "0 0 0 0", length=1)]):
        with pytest.raises(
            UserError, match="vt at 4096 tokens: expected scores of the same prompts"
        ):
            differences(one[:1], strange)


WORDS = ("model.interpolate_positions=true", "ruler.tasks=[niah_single_2,vt,own_qa_1]",
         "ruler.lengths=[1300,1500]", "ruler.samples=2")  # fmt: skip


def answered(monkeypatch: pytest.MonkeyPatch, *, stop_after: int = 99) -> list[int]:
    """The model is replaced by one that repeats its prompt, and is killed after so many rows."""
    asked: list[int] = []

    def answers(trained, hardware, prompts, count, *, chat):
        if len(asked) == stop_after:
            raise KeyboardInterrupt
        asked.append(len(prompts[0]) + count)
        return [trained.tokenizer.decode(one) for one in prompts]

    monkeypatch.setattr(run, "_answers", answers)
    return asked


def killed(
    trained: Path, tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, tuple[str, ...]]:
    """A copy of the run with a command that was killed after four rows, and the command's words."""
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("ruler"))
    words = ("mode=ruler", f"checkpoint={run}", f"ruler.path={text_folder}", *WORDS)
    answered(monkeypatch, stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        run_mode(*words)
    return run, words


def test_a_model_that_repeats_its_prompt_gets_100_and_what_was_killed_goes_on(
    trained: Path, tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    trained, words = killed(trained, tmp_path, text_folder, monkeypatch)
    begun = read_result(trained / "ruler" / "result.json").rows
    assert len(begun) == 4
    asked = answered(monkeypatch)
    assert run_mode(*words) == 0
    assert len(asked) == 2  # the rows that were left
    result = read_result(trained / "ruler" / "result.json")
    assert result.rows[:4] == begun
    places = [(at, task) for at in (1300, 1500) for task in ("niah_single_2", "vt", "own_qa_1")]
    places += [(1300, "mean"), (1500, "mean")]
    assert [(one["length"], one["task"]) for one in result.rows] == places
    assert {one["score"] for one in result.rows} == {100.0}
    assert result.rows[-1]["tasks"] == 2
    assert "niah_single_2" in capsys.readouterr().out
    said = [json.loads(line) for line in (trained / "ruler" / "answers.jsonl").open()]
    assert len(said) == 12
    assert all(one in line["answer"] for line in said for one in line["expected"])
    assert run_mode(*words) == 0  # what is finished is done anew
    anew = read_result(trained / "ruler-2" / "result.json").rows
    assert [(one["prompts"], one["scores"]) for one in anew] == [
        (one["prompts"], one["scores"]) for one in result.rows
    ]


def change_weights(run: Path) -> list[str]:
    for path in (run / "checkpoints").glob("*.ckpt"):
        saved = torch.load(path)
        next(iter(saved["state_dict"].values())).add_(1)
        torch.save(saved, path)
    return []


@pytest.mark.parametrize(
    "change", [change_weights, lambda run: ["attention=standard"]], ids=["weights", "setting"]
)
def test_what_another_model_has_begun_is_left_alone(
    trained: Path, tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch, change
) -> None:
    trained, words = killed(trained, tmp_path, text_folder, monkeypatch)
    asked = answered(monkeypatch)
    assert run_mode(*words, *change(trained)) == 0
    assert len(asked) == 6  # none is of the same step's other weights
    rows = [read_result(trained / name / "result.json").rows for name in ("ruler", "ruler-2")]
    assert [len(one) for one in rows] == [4, 8]
    assert rows[0][0]["identity"] != rows[1][0]["identity"]


@pytest.mark.integration
def test_the_mode_asks_the_model_itself_and_leaves_a_heat_map(
    trained: Path, tmp_path: Path
) -> None:
    words = ("mode=ruler", f"checkpoint={trained}", "ruler.tasks=[niah_single_1,fwe]")
    assert run_mode(*words, WORDS[0], "ruler.lengths=[800]", "ruler.samples=2") == 0
    found = read_result(trained / "ruler" / "result.json")
    assert [one["score"] for one in found.rows] == [0, 0, 0]  # it has learned nothing of the kind
    assert f"checkpoint={trained}" in found.command
    words = shlex.split(found.command)[3:]
    assert settings_of(words).ruler.lengths == [800]  # the command in the file can be given again
    assert (trained / "ruler" / "ruler.png").read_bytes().startswith(b"\x89PNG")
    drawn = component("figure", "ruler")(found.rows * 2, tmp_path / "both.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_task_that_is_none_and_a_mode_that_is_gone_are_answered(trained: Path) -> None:
    with pytest.raises(UserError, match=r"ruler\.tasks"):
        settings_of(["mode=ruler", f"checkpoint={trained}", "ruler.tasks=[niah]"])
    with pytest.raises(UserError, match="mode=passkey: use mode=ruler"):
        settings_of(["mode=passkey", f"checkpoint={trained}"])


def test_the_command_of_a_result_says_null_where_the_recipe_has_a_value():
    words = ["recipe=extend", "mode=ruler", "model.path=MODEL", "model.adapter=null"]
    settings = compose_settings(CommandLine.of(words))
    assert "model.adapter=null" in scored_command(settings, "ruler")
