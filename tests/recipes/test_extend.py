"""recipe=extend: which commands it starts, and how their results are compared."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from jobs import run_job
from transformers import LlamaConfig, LlamaForCausalLM

from flashtrain.command import modes
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.compose import compose_settings
from flashtrain.folders.run_folder import read_summary
from flashtrain.report.rows import read_result, write_result
from flashtrain.settings.command_line import CommandLine
from flashtrain_recipes.extend.run import SERIES, Part, compared, parts, run_extend

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def words(model: Path, *others: str) -> list[str]:
    return [
        "recipe=extend",
        f"model.path={model}",
        "data.tokenizer=bytes",
        "stages=[{context: 2048, steps: 2, rope: yarn, rope_factor: 2}]",
        "ruler.lengths=[1024,2048]",
        *others,
    ]


def commands(model: Path | None, folder: Path, *others: str) -> dict[str, list[str]]:
    given = words(model or Path(), *others)
    given = [word for word in given if model or not word.startswith("model.path=")]
    settings = compose_settings(given)
    return {part.name: list(part.words) for part in parts(settings, CommandLine(given), folder)}


def test_the_model_is_scored_as_it_was_with_the_scaling_alone_and_trained(model, tmp_path) -> None:
    found = commands(model, tmp_path, "ruler.samples=3", "optimizer.learning_rate=0.01")
    assert [*found] == [
        "RULER, untouched",
        "loss by position, untouched",
        "RULER, scaling alone",
        "loss by position, scaling alone",
        "training",
        "RULER, trained",
        "loss by position, trained",
    ]
    assert "ruler.samples=3" not in found["training"]
    assert "optimizer.learning_rate=0.01" in found["training"]
    assert "ruler.lengths=[1024]" in found["RULER, untouched"]
    assert "model.rope=yarn" not in found["RULER, untouched"]
    assert {"model.rope=yarn", "model.rope_factor=2.0"} < {*found["RULER, scaling alone"]}
    assert "model.adapter=null" in found["RULER, scaling alone"]
    assert f"checkpoint='{tmp_path / 'training'}'" in found["RULER, trained"]


def test_all_are_scored_on_the_documents_that_the_training_holds_out(model, tmp_path) -> None:
    found = commands(model, tmp_path)
    for name in ("untouched", "scaling alone", "trained"):
        assert "positions.at_least=2049" in found[f"loss by position, {name}"]
    assert "data.split_context=2048" in found["loss by position, untouched"]
    assert "positions.length=1024" in found["loss by position, untouched"]


def test_the_trainings_own_settings_reach_it_and_no_score(model, tmp_path) -> None:
    own = ["model.adapter_rank=64", "stages=[{context: 1024, steps: 2}]"]
    found = commands(model, tmp_path, *own, "hardware.precision=32-true", "ruler.samples=50")
    assert {*own, "hardware.precision=32-true"} < {*found["training"]}
    score = {*found["RULER, scaling alone"]}
    assert {"hardware.precision=32-true", "ruler.samples=50", "context=1024"} < score
    assert not any(word.startswith("model.adapter_rank") for word in score)


def test_without_a_model_one_is_trained_first_and_extended(tmp_path) -> None:
    own = ["model.config=llama", "+model.options.hidden_size=32", "context=1024"]
    found = commands(None, tmp_path, *own)
    assert next(iter(found)) == "start"
    assert {"stages=[]", *own[:2], "data.split_context=2048"} < {*found["start"]}
    start = f"model.path='{tmp_path / 'start'}'"
    for name in ("training", "RULER, untouched", "loss by position, scaling alone"):
        assert start in found[name]
    assert {"model.config=null", "model.options={}"} < {*found["training"]}
    assert own[1] not in found["training"]
    assert "model.adapter=null" in found["RULER, untouched"]


def result(folder: Path, scores: str, *, samples: int) -> Part:
    row = {"length": 1024, "task": "mean", "scores": scores, "prompts": "a"}
    row |= {"score": sum(map(int, scores.split())) / 2, "score_low": 0.0, "score_high": 100.0}
    command = f"python -m flashtrain mode=ruler ruler.samples={samples}"
    write_result(folder / "ruler" / "result.json", "extend", command, [row])
    given = frozenset(["ruler.samples=2"])
    return Part("RULER", [], folder, SERIES[folder.name], "ruler", given)


def test_scores_are_compared_on_the_same_prompts(tmp_path) -> None:
    every = {"untouched": "0 100", "scaled": "0 0", "training": "100 100"}
    whole = [result(tmp_path / name, scores, samples=2) for name, scores in every.items()]
    rows = {row["series"]: row for row in compared(whole)}
    assert {*rows} == {*SERIES.values()}
    assert rows["trained"]["against_scaled"] == 100
    assert rows["trained"]["against_untouched"] == 50
    assert rows["trained"]["against_untouched_low"] <= 50


def test_a_score_of_other_settings_is_none_of_the_study(tmp_path) -> None:
    assert result(tmp_path / "scaled", "0 0", samples=2).is_done()
    assert not result(tmp_path / "untouched", "0 0", samples=20).is_done()


def in_this_process(given: list[str]) -> int:
    named = dict(word.split("=", 1) for word in given)
    if named["mode"] in ("ruler", "positions"):
        settings = settings_from_checkpoint(given)
        assert settings is not None
        return modes.run_mode(settings)
    own = [word for word in given if not word.startswith(("hydra.", "resume="))]
    folder = Path(named["hydra.run.dir"].strip("'"))
    folder.mkdir(exist_ok=True)
    return run_job(compose_settings(own), folder, overrides=own, started=time.monotonic())


def done_twice(study, given: list[str], above: Path) -> tuple[Path, int]:
    """The folder below `above` of a study, and how many commands it started. Gone on with when it
    has finished, it starts none."""
    started: list[str] = []

    def start(part: list[str]) -> int:
        started.append(" ".join(part))
        return in_this_process(part)

    line = CommandLine(given)
    assert study(compose_settings(given), line, started=time.monotonic(), start=start) == 0
    (folder,), count = above.iterdir(), len(started)
    again = compose_settings([*given, f"resume={folder}"])
    assert study(again, line, started=time.monotonic(), start=start) == 0
    assert len(started) == count
    return folder, count


@pytest.mark.integration
def test_a_study_trains_scores_and_does_nothing_twice(model, tmp_path) -> None:
    given = words(
        model,
        "hardware=cpu",
        "hardware.demo=never",
        "logger=none",
        "data.include_tests=false",
        "trainer.tokens_per_step=2048",
        "ruler.samples=1",
        "ruler.tasks=[niah_single_1]",
        "positions.documents=2",
        f"output={tmp_path}",
    )
    folder, commands_started = done_twice(run_extend, given, tmp_path / "extend")
    assert commands_started == 7
    rows = read_result(folder / "result.json").rows
    assert {(row["part"], row["series"]) for row in rows} == {
        (part, name) for part in ("ruler", "positions") for name in SERIES.values()
    }
    last = [row for row in rows if row["part"] == "positions" and row["series"] == "trained"][-1]
    assert (last["end"], last["documents"]) == (2048, 2)
    assert (folder / "extend.png").is_file()
    assert read_summary(folder)["status"] == "finished"
