"""Every recipe says what it is, and trains or measures a step on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from jobs import run_job
from tiny_runs import each

from flashtrain.command.compose import compose_settings
from flashtrain.files.shipped import recipe_files
from flashtrain.report.__main__ import main as report
from flashtrain.report.rows import read_result
from flashtrain.settings.command_line import CommandLine
from flashtrain_recipes.context_study import run_study
from flashtrain_recipes.huggingface_benchmark import figures as long_figures
from flashtrain_recipes.step_benchmark import figures as step_figures

RECIPES = sorted(recipe_files())
# Trained by tests/recipes/arena/test_classifier_recipes.py.
CLASSIFIERS = [
    name for name in RECIPES if name.startswith(("lra-", "path")) and name != "pathfinder-preview"
]
# Likewise, by tests/tasks/masked_language/test_bert_recipes.py.
BERTS = ["bert", "bert-lamb", "bert-finetune", "bert-speed", "long-document"]
# Likewise, by tests/tasks/test_chat_runs.py: it needs somebody's conversations
# and a model's folder.
CHATS = ["sft"]
STUDIES = ["extend", "hybrid-quality"]  # test_extend.py, test_hybrid_quality.py
# What keeps a recipe that does more than one thing to its smallest.
SMALLEST = {
    "gpt2-long": ("lengths.contexts=[64]", "lengths.windows=2"),
    "gpt2-speed": ("benchmark.batches=[1]",),
}


def run(words: list[str], folder: Path) -> int:
    """The run of these words, in this process: tests/command/test_command.py starts the
    command as a user does."""
    folder.mkdir(parents=True, exist_ok=True)
    return run_job(compose_settings(words), folder, overrides=words, started=time.monotonic())


def run_training(words: list[str]) -> int:
    """A training that mode=lengths would start as a command of its own."""
    told = dict(word.split("=", 1) for word in words)
    return run(
        [word for word in words if not word.startswith("hydra.")],
        Path(told["hydra.run.dir"].strip("'")),
    )


QUICK = ("gpt2", "gpt2-speed", "hf")


@pytest.mark.parametrize(
    "recipe",
    each((name for name in RECIPES if name not in CLASSIFIERS + BERTS + CHATS + STUDIES), *QUICK),
)
def test_it_trains_or_measures_a_step_on_a_cpu(recipe: str, tmp_path) -> None:
    words = [
        f"recipe={recipe}",
        "hardware=cpu",
        "logger=none",
        *SMALLEST.get(recipe, ()),
        f"output={tmp_path}",
    ]
    settings = compose_settings(words)
    if settings.mode in ("train", "lengths"):
        words += ["trainer.steps=1", "trainer.tokens_per_step=512", "generate.max_new_tokens=4"]
    elif settings.mode == "benchmark":
        words += [
            "benchmark.rounds=1",
            "benchmark.steps=1",
            "benchmark.contexts=[32,64]",
            "benchmark.max_seconds=null",
        ]
    if settings.mode == "lengths":
        assert (
            run_study(
                compose_settings(words),
                CommandLine(words),
                started=time.monotonic(),
                start=run_training,
            )
            == 0
        )
    else:
        assert run(words, tmp_path / recipe / "run") == 0
    (summary,) = tmp_path.glob(f"{recipe}/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"


RESULTS = Path(__file__).parents[2] / "recipes" / "results"
FIGURES = {
    "accuracy": "lra-h200",
    "attention-lengths": "attention-paper-h200",
    "attention-shapes": "attention-anchors-h200",
    "curriculum": "pathfinder-original-training-h200",
    "documents": "long-document-h200",
    "extend": "extend-smollm2-h200",
    "landing": "context-speed-h200",
    "lengths": "gpt2-long-h200",
    "longest": "hf-long-h200",
    "ruler": "ruler-qwen2.5-coder-h200",
    "speed": "context-speed-h200",
    "training": "bert-training-h200",
}


def test_every_published_figure_is_drawn_by_the_script_that_draws_all() -> None:
    lines = (RESULTS / "draw.sh").read_text(encoding="utf-8").splitlines()
    drawn = {line.split()[2].removesuffix(".json") for line in lines if line.startswith("draw ")}
    assert drawn == {path.stem for path in RESULTS.glob("*.png")}


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_is_drawn_from_its_published_rows_and_from_no_others(
    figure: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = ["--figure", figure]
    assert report([str(RESULTS / "first-call-h200.json"), *drawn]) != 0
    assert not list(tmp_path.glob("*.png"))
    assert report([str(RESULTS / f"{FIGURES[figure]}.json"), *drawn]) == 0
    assert max(path.stat().st_size for path in tmp_path.glob("*.png")) > 10_000


def test_the_landing_figure_has_the_strongest_baseline_and_the_longest_step(
    tmp_path, monkeypatch
) -> None:
    drawn: list[dict] = []
    monkeypatch.setattr(
        step_figures, "line_figure", lambda rows, *_, **__: drawn.extend(rows) or tmp_path
    )
    files = ("context-speed-h200", "gpt2-million-h200")
    rows = [row for name in files for row in read_result(RESULTS / f"{name}.json").rows]
    step_figures.landing_figure(rows, tmp_path / "landing.png")
    longest = {
        name: max(row["context"] for row in drawn if row["implementation"] == name)
        for name in {row["implementation"] for row in drawn}
    }
    assert longest == {"flashtrain": 1_048_576, "PyTorch SDPA, compiled": 131_072}


def test_a_machine_has_one_bar_in_the_figure_of_the_longest_steps(tmp_path, monkeypatch) -> None:
    """A step that was run far below the plan is in the bar's text, and is not the machine's
    longest."""
    drawn: dict[str, list] = {}
    monkeypatch.setattr(
        long_figures, "bar_figure", lambda groups, *_, **__: drawn.update(groups) or tmp_path
    )
    results = [read_result(RESULTS / f"hf-long-{card}.json") for card in ("h200", "h100")]
    rows = [{"measured": one.device, **row} for one in results for row in one.rows]
    long_figures.longest_figure(rows, tmp_path / "longest.png")
    assert [tuple(bar[:2]) for bar in drawn["llama-1b"]] == [("H100", 954_368), ("H200", 1_802_240)]
    assert "planned (host memory); run: 131,072" in drawn["llama-1b"][1].text
