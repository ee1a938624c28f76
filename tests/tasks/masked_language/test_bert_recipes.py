"""Every recipe of BERT's trains or measures a step on this machine, by its demo."""

from __future__ import annotations

import json
import time

import pytest
from jobs import run_job
from tiny_runs import each

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.settings.command_line import CommandLine
from flashtrain_recipes.bert_benchmark import cases as speed_case
from flashtrain_recipes.context_study import run_study

MASKED = (
    "trainer.steps=1",
    "trainer.tokens_per_step=256",
    "masked.token_budget=256",
    "masked.validation_samples=4",
)
DOCUMENTS = (
    "trainer.steps=1",
    "finetune.batch=2",
    "finetune.train=8",
    "finetune.validation=2",
    "finetune.test=4",
)
SMALLEST = {
    "bert": ("context=64", *MASKED),
    "bert-lamb": ("context=64", *MASKED),
    "bert-finetune": DOCUMENTS,
    "bert-speed": (
        "benchmark.rounds=1",
        "benchmark.steps=1",
        "benchmark.contexts=[16]",
        "benchmark.tokens=32",
        "benchmark.samples=4",
        "benchmark.dropouts=[0,0.1]",
        "benchmark.max_seconds=null",  # a busy machine must not leave cases out
    ),
}


@pytest.fixture
def words(text_folder, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache"))
    return ["hardware=cpu", "logger=none", f"output={tmp_path}", "data.tokenizer=bytes"]


@pytest.fixture
def text(text_folder) -> list[str]:
    return ["data=files", f"data.path={text_folder}", "data.validation_fraction=0.3"]


@pytest.mark.parametrize("recipe", each(SMALLEST, "bert", "bert-finetune"))
def test_it_trains_or_measures_a_step_on_a_cpu(
    recipe: str, words, text, tmp_path, monkeypatch
) -> None:
    # Of 30,528 tokens the embedding is most of a tiny BERT's time.
    monkeypatch.setattr(speed_case, "VOCAB_SIZE", 320)
    words = [
        f"recipe={recipe}",
        *words,
        *(() if recipe == "bert-finetune" else text),
        *SMALLEST[recipe],
    ]
    status = run_job(compose_settings(words), tmp_path, overrides=words, started=time.monotonic())
    row = json.loads((tmp_path / "summary.json").read_text())
    assert (status, row["status"]) == (0, "finished"), row
    if recipe == "bert-speed":
        check_speed(json.loads((tmp_path / "result.json").read_text())["rows"])


def check_speed(rows) -> None:
    told = {"implementation", "model", "length", "padding", "dropout", "batch", "rows_per_second"}
    told |= {"real_tokens_per_second", "mfu", "peak_memory_gib"}
    measured = [row for row in rows if row.get("rows_per_second")]
    assert all(told <= row.keys() for row in measured)
    assert {row["length"] for row in measured} == {16, "paragraph"}
    assert {row["dropout"] for row in measured} == {0.0, 0.1}
    assert {row["padding"] for row in measured} == {
        "packed",
        "full rows",
        "random batches",
        "length buckets",
    }
    ours = [row for row in measured if row["implementation"] == "flashtrain, packed"]
    assert len(ours) == 4
    assert all(row["over_random_batches"] > 0 for row in ours)
    assert all((row["over_length_buckets"] is None) == (row["length"] == 16) for row in ours)
    assert all(row["without_dropout"] > 0 for row in ours if row["dropout"])


def test_long_document_looks_at_its_texts_before_it_trains(words, tmp_path) -> None:
    words = ["recipe=long-document", *words, *DOCUMENTS, "lengths.contexts=[16,32]"]
    given = [*words, "finetune.data=files", f"finetune.path={tmp_path / 'nowhere'}"]
    with pytest.raises(UserError, match="no labelled texts at"):
        run_study(
            compose_settings(given),
            CommandLine(given),
            started=time.monotonic(),
            start=lambda _: pytest.fail("trained"),
        )


@pytest.mark.integration
def test_long_document_trains_each_context_and_draws_the_scores(words, tmp_path) -> None:
    words = [
        "recipe=long-document",
        *words,
        *DOCUMENTS,
        "lengths.contexts=[16,32]",
        "finetune.length=32",
    ]
    started: list[str] = []

    def start(given: list[str]) -> int:
        folder = (
            next(word for word in given if word.startswith("hydra.run.dir="))
            .split("=", 1)[1]
            .strip("'")
        )
        started.append(folder)
        settings = compose_settings(
            [word for word in given if not word.startswith("hydra.run.dir=")]
        )
        return run_job(settings, tmp_path / folder, overrides=given, started=time.monotonic())

    assert (
        run_study(
            compose_settings(words), CommandLine(words), started=time.monotonic(), start=start
        )
        == 0
    )
    assert len(started) == 2
    (folder,) = tmp_path.glob("long-document/*/")
    rows = json.loads((folder / "result.json").read_text())["rows"]
    assert [(row["context"], row["samples"], row["scored"]) for row in rows] == [
        (16, 2, "test"),
        (32, 2, "test"),
    ]
    assert all(0 <= row["micro_f1"] <= 1 for row in rows)
    assert rows[0]["best_micro_f1"] < rows[1]["best_micro_f1"] <= 1
    assert (folder / "score.png").stat().st_size > 10_000
    # A second command finds both trained.
    assert (
        run_study(
            compose_settings(words), CommandLine(words), started=time.monotonic(), start=start
        )
        == 0
    )
    assert len(started) == 2


def test_real_lengths_can_be_measured_without_full_rows() -> None:
    settings = compose_settings(
        ["recipe=bert-speed", "benchmark.contexts=[]", "benchmark.dropouts=[0]"]
    )
    assert [(case.context, case.unit) for case in speed_case.cases(settings)] == [
        (512, "paragraph")
    ]
