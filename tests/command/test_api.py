"""The command in Python: the same runs, several in one program or notebook."""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from tiny_runs import TinyRuns

import flashtrain
from flashtrain import UserError, registry
from flashtrain.command.api import words_of
from flashtrain.errors import RunFailed
from flashtrain.files.shipped import conf_folder
from flashtrain.training.checkpoints import read_checkpoint

pytestmark = pytest.mark.integration  # whole runs


@pytest.fixture
def tiny(tiny_runs: TinyRuns, tmp_path: Path) -> dict[str, Any]:
    """The tiny configuration as Python's settings, in a folder of its own."""
    pairs = [word.split("=", 1) for word in tiny_runs.settings_words(f"output={tmp_path / 'runs'}")]
    return {key: yaml.safe_load(value) for key, value in pairs}


class At(pl.Callback):
    """Does something when the given optimizer step is done, once."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and self.act is not None:
            act, self.act = self.act, None
            act()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """at(step, act): settings of a run that does `act` then."""

    def settings(step: int, act: Any) -> dict[str, Any]:
        monkeypatch.setitem(registry._components["callback"], "at", lambda _: At(step, act))
        return {"trainer.callbacks": ["at"]}

    return settings


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def test_a_run_is_the_commands_bit_for_bit_prints_nothing_and_leaves_the_process_as_it_was(
    tiny: dict[str, Any], trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = flashtrain.train(**tiny)
    assert "".join(capfd.readouterr()) == ""
    expected, got = weights(trained), weights(run.folder)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    names = {path.name for path in run.folder.iterdir()}
    assert {
        "config.yaml",
        "summary.json",
        "metrics.jsonl",
        "checkpoints",
        "tokenizer",
        "flashtrain.log",
    } <= names
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    assert (run.summary["status"], run.settings.context) == ("finished", 32)
    assert run.checkpoint == run.folder / "checkpoints" / "best.ckpt"
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3, 4, 5]
    assert "finished gpt2-demo" in (run.folder / "flashtrain.log").read_text()
    assert Path(run) == run.folder


def test_it_is_quiet_beside_handlers_that_a_notebook_came_with_but_for_warnings(
    tiny: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    try:
        # Asks for a model: without it the recipe's demo is trained here.
        for key in ("model.size", "model.vocab_rows"):
            del tiny[key]
        flashtrain.train(**{**tiny, "trainer.steps": 1})
    finally:
        logging.getLogger().removeHandler(handler)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(
        "no NVIDIA GPU found here: training the recipe's small demo model instead"
    )
    assert err.count("\n") == 1


def test_not_quiet_it_says_what_the_command_says(
    tiny: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    flashtrain.train(**tiny, quiet=False)
    out, err = capfd.readouterr()
    assert "a sample of what it writes now" in out
    assert "try next: python -m flashtrain mode=generate" in out
    assert "step 6/6" in err


def test_what_came_of_a_run_is_evaluated_written_with_loaded_and_exported(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = json.loads((trained / "summary.json").read_text())
    assert flashtrain.load(trained).checkpoint.name == "best.ckpt"
    last = trained / "checkpoints" / "last.ckpt"
    loaded = flashtrain.load(last)
    assert (loaded.folder, loaded.step, loaded.settings.context) == (trained, 6, 32)
    assert loaded.tokenizer is not None
    assert not loaded.model.training
    for which in (last, str(last), loaded):
        assert flashtrain.evaluate(which)["validation_loss"] == pytest.approx(
            row["validation_loss"], rel=1e-5
        )
    text = flashtrain.generate(last, "the quick", 8, temperature=0.5)
    assert text.startswith("the quick")
    assert flashtrain.generate(loaded, "the quick", 8, temperature=0.5) == text
    tokens = torch.tensor([loaded.tokenizer.encode("the quick")])
    written = flashtrain.generate(loaded.model, tokens, 8, temperature=0.5)
    assert loaded.tokenizer.decode(written[0].tolist()) == text
    torch.nn.init.zeros_(loaded.model.token_embedding.weight)
    # The model as it is now.
    assert flashtrain.generate(loaded, "the quick", 8, temperature=0.5) != text
    assert (flashtrain.export(trained) / "model.safetensors").is_file()
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"trainer": {"steps": 10, "compile": False}},
            ["trainer.steps=10", "trainer.compile=false"],
        ),
        (
            {"optimizer": {"name": "lamb", "learning_rate": 1e-5}},
            ["optimizer=lamb", "optimizer.learning_rate=1e-05"],
        ),
        (
            {"data": {"source": "files", "path": Path("a b/c.txt")}},
            ["data=files", "data.path='a b/c.txt'"],
        ),
        ({"data": {"text_column": "null"}}, ["data.text_column='null'"]),
        (
            {"memory": {"activation_checkpointing": "full"}, "hardware": {"demo": "never"}},
            ["memory.activation_checkpointing=full", "hardware.demo=never"],
        ),
        ({"model.options.width": 8}, ["++model.options.width=8"]),
        (
            {"resume": None, "optimizer": {"betas": (0.9, 0.95)}},
            ["resume=null", "optimizer.betas=[0.9,0.95]"],
        ),
        ({"prompt": "it's ${HOME}"}, ["prompt='it\\'s \\${HOME}'"]),
    ],
    ids=lambda one: str(one)[:40],
)
def test_settings_are_the_commands_words(given: dict[str, Any], words: list[str]) -> None:
    assert words_of(given) == words


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"context": datetime.date(2026, 1, 2)}, "context is a date. Expected None, bool, int"),
        ({"context": 33}, "must be a multiple of context=33"),
        ({"data": {"source": "files", "path": "nowhere.txt"}}, "nowhere.txt"),
        ({"mode": "plan"}, "mode=plan does not train. Call flashtrain.plan."),
        ({"recipe": "gpt2-long", "hardware": "cpu"}, "python -m flashtrain recipe=gpt2-long"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_mistake_is_one_line_and_the_process_as_it_was(
    tiny: dict[str, Any], tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    settings = {**tiny, **given} if "recipe" not in given else given
    if isinstance(given.get("data"), dict):
        del settings["data.path"]
    with pytest.raises(UserError, match=told.replace(".", r"\.").replace("(", r"\(")) as error:
        flashtrain.train(**settings)
    assert "\n" not in str(error.value)


def test_ctrl_c_leaves_a_checkpoint_and_a_process_in_which_the_run_goes_on(
    tiny: dict[str, Any], trained: Path, at: Any
) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"step 3 \(SIGINT\).*resume="):
        flashtrain.train(**tiny, **at(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    run = flashtrain.train(**tiny, resume="auto")
    assert len(list(run.folder.parent.iterdir())) == 1
    expected, got = weights(trained), weights(run.folder)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_second_ctrl_c_ends_at_once_and_can_be_caught(tiny: dict[str, Any], at: Any) -> None:

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        flashtrain.train(**tiny, **at(4, twice))


def test_ctrl_c_in_an_evaluation_can_be_caught(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(flashtrain.LanguageModel, "validation_step", interrupted)
    # In a shell's background it may be.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            flashtrain.evaluate(trained)
    finally:
        signal.signal(signal.SIGINT, ignored)


def test_sigterm_leaves_a_checkpoint_and_is_then_the_programs(
    tiny: dict[str, Any], at: Any
) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        run = flashtrain.train(**tiny, **at(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert run.summary["status"] == "stopped"
    assert read_checkpoint(run.checkpoint)["global_step"] in (2, 3)


def test_a_run_that_fails_raises_and_reports_it_in_its_row(tiny: dict[str, Any], at: Any) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of a callback")

    with pytest.raises(ZeroDivisionError):
        flashtrain.train(**tiny, **at(2, fail))
    with pytest.raises(UserError, match="step"):
        flashtrain.train(**{**tiny, "optimizer.learning_rate": 1e30, "optimizer.gradient_clip": 0})
    rows = [
        json.loads(path.read_text())
        for path in sorted(Path(tiny["output"]).glob("gpt2/*/summary.json"))
    ]
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert rows[0]["error"] == "ZeroDivisionError: of a callback"
    first, second = sorted(Path(tiny["output"]).glob("gpt2/*/"))
    assert "ZeroDivisionError: of a callback" in (first / "flashtrain.log").read_text()
    assert rows[1]["error"] in (second / "flashtrain.log").read_text()


@pytest.fixture
def a_hydra_program() -> Iterator[None]:
    """Hydra is the caller's, as within a function of hydra.main."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        yield


def test_in_a_hydra_program_and_in_a_thread(tiny: dict[str, Any], a_hydra_program: None) -> None:
    before, found = GlobalHydra.instance().hydra, []
    thread = threading.Thread(
        target=lambda: found.append(flashtrain.train(**{**tiny, "trainer.steps": 1}))
    )
    thread.start()
    thread.join()
    assert found[0].summary["steps"] == 1
    assert GlobalHydra.instance().hydra is before is not None


@pytest.mark.longest
@pytest.mark.slow  # two ranks start
def test_several_devices_are_a_process_of_their_own(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    two = {"trainer.devices": 2, "trainer.strategy": "ddp"}
    stopped = flashtrain.train(**tiny, **two, **{"trainer.max_minutes": 1e-6})
    assert stopped.summary["status"] == "stopped"
    run = flashtrain.train(**tiny, **two, resume="auto")
    assert (run.folder, run.summary["status"], run.summary["devices"]) == (
        stopped.folder,
        "finished",
        2,
    )
    with pytest.raises((UserError, RunFailed), match="step"):
        flashtrain.train(
            **{**tiny, **two, "optimizer.learning_rate": 1e30, "optimizer.gradient_clip": 0}
        )
