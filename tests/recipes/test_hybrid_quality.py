"""recipe=hybrid-quality: which commands it starts, and how their results are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_extend import done_twice

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_summary
from flashtrain.mode import check_settings
from flashtrain.report.rows import read_result
from flashtrain.settings.command_line import CommandLine
from flashtrain_recipes.hybrid_quality.run import parts, run_patterns

RECIPE = ["recipe=hybrid-quality", "patterns.compared=[full,gla+full]", "patterns.seeds=2"]


def commands(folder: Path, *others: str) -> dict[str, set[str]]:
    given = [*RECIPE, *others]
    settings = compose_settings(given)
    return {part.name: {*part.words} for part in parts(settings, CommandLine(given), folder)}


def test_each_pattern_is_trained_and_scored_and_the_first_with_further_seeds(tmp_path) -> None:
    found = commands(tmp_path, "optimizer.learning_rate=0.01", "ruler.samples=3", "seed=5")
    series = ("full", "full, seed 6", "gla+full")
    each = [(name, f"positions, {name}", f"ruler, {name}") for name in series]
    assert list(found) == [name for names in each for name in names]
    own = {"optimizer.learning_rate=0.01", "mode=train", "resume=auto", "seed=5"}
    assert own | {"model.pattern=[gla,full]"} < found["gla+full"]
    assert {"model.pattern=[full]", "seed=6"} < found["full, seed 6"]
    assert not any(word.startswith(("patterns.", "ruler.")) for word in found["full"])


def test_all_are_scored_on_the_same_prompts_and_documents_whatever_their_seed(tmp_path) -> None:
    found = commands(tmp_path, "ruler.samples=3", "positions.documents=7")
    for name in ("full", "full, seed 1", "gla+full"):
        assert {"seed=0", "ruler.samples=3"} < found[f"ruler, {name}"]
        assert {"seed=0", "positions.documents=7"} < found[f"positions, {name}"]


def test_without_patterns_there_is_nothing_to_compare() -> None:
    with pytest.raises(UserError, match=r"patterns\.compared"):
        check_settings(compose_settings(["recipe=gpt2", "mode=patterns"]))


@pytest.mark.integration
def test_a_study_shows_losses_beside_the_first_patterns_and_does_nothing_twice(tmp_path) -> None:
    given = [
        *RECIPE,
        "model.size=demo",
        "model.width=32",
        "model.heads=2",
        "model.layers=2",
        "model.vocab_rows=null",
        "context=256",
        "hardware=cpu",
        "hardware.demo=never",
        "logger=none",
        "data=stdlib",
        "data.tokenizer=bytes",
        "data.include_tests=false",
        "data.validation_tokens=2048",
        "trainer.steps=2",
        "trainer.tokens_per_step=512",
        "ruler.lengths=[512]",
        "ruler.samples=1",
        "ruler.tasks=[niah_single_1]",
        "positions.documents=2",
        f"output={tmp_path}",
    ]
    folder, commands_started = done_twice(run_patterns, given, tmp_path / "hybrid-quality")
    assert commands_started == 3 * 3
    rows = read_result(folder / "result.json").rows
    series = ("full", "full, seed 1", "gla+full")
    assert {(row["part"], row["series"]) for row in rows} == {
        (part, name) for part in ("positions", "ruler") for name in series
    }
    losses = [row for row in rows if row["part"] == "positions"]
    first = {row["position"]: row["loss"] for row in losses if row["series"] == "full"}
    for row in losses:
        assert row["difference"] == pytest.approx(row["loss"] - first[row["position"]], abs=1e-4)
    assert len({row["text"] for row in losses}) == 1
    assert (folder / "loss.png").is_file()
    assert (folder / "ruler.png").is_file()
    assert read_summary(folder)["status"] == "finished"
