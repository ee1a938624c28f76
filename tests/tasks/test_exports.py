"""mode=export: in which dtype, what it says of rounding, and what a following
training takes in its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hybrid_models import hybrid
from safetensors.torch import load_file
from tiny_runs import TinyRuns, made_once
from transformers import AutoModelForCausalLM

import flashtrain
from flashtrain.command.request import settings_of
from flashtrain.folders.new_folder import run_folder
from flashtrain.folders.run_folder import read_settings, read_summary, write_summary
from flashtrain.folders.run_lock import let_go
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.tasks.language import exports
from flashtrain.training.checkpoints import read_checkpoint


@pytest.fixture(scope="session")
def half(base: Path) -> Path:
    """The tiny Llama in bfloat16."""
    folder = base.parent / "half"
    shutil.copytree(base, folder)
    AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    return folder


@pytest.fixture
def of_half(half: Path, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has changed all weights of the bfloat16 model."""
    runs = TinyRuns(half.parent, [*words, f"model.path={half}"])
    return made_once(tmp_path_factory, "of-half", runs.finished)


def best(run: Path) -> dict[str, torch.Tensor]:
    state = read_checkpoint(run / "checkpoints" / "best.ckpt")["state_dict"]
    return {name.removeprefix("model."): one for name, one in state.items()}


def written(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_an_export_has_the_origins_dtype_and_reports_by_how_much_it_rounds(
    of_half: Path, caplog
) -> None:
    exact = best(of_half)
    assert {one.dtype for one in exact.values()} == {torch.float32}
    with caplog.at_level("INFO", "flashtrain"):
        folder = flashtrain.export(of_half, quiet=False)
    assert folder == of_half / "export"
    assert all(torch.equal(one, exact[name].bfloat16()) for name, one in written(folder).items())
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    largest = max((one - one.bfloat16().float()).abs().max().item() for one in exact.values())
    change = torch.cat([(one - one.bfloat16().float()).flatten() for one in exact.values()]).norm()
    relative = change / torch.cat([one.flatten() for one in exact.values()]).norm()
    assert (
        f"rounds weights by at most {largest:.1e} ({relative:.1e} relative)" in caplog.messages[-1]
    )
    assert "export.dtype=float32" in caplog.messages[-1]


def test_float32_is_exact_and_prints_nothing_of_rounding(of_half: Path, caplog) -> None:
    exact = best(of_half)
    with caplog.at_level("INFO", "flashtrain"):
        folder = flashtrain.export(of_half, quiet=False, export={"dtype": "float32"})
    assert all(torch.equal(one, exact[name]) for name, one in written(folder).items())
    assert "rounds" not in caplog.text


@pytest.mark.integration
def test_a_following_training_never_takes_what_was_rounded(of_half: Path, words: list[str]) -> None:
    rounded = flashtrain.export(of_half)
    taken = Path(settings_of(["mode=generate", f"model.path={of_half}"]).model.path)
    assert taken not in (rounded, of_half)
    exact = best(of_half)
    assert all(torch.equal(one, exact[name]) for name, one in written(taken).items())
    assert flashtrain.export(of_half).name == "export-2"  # which is not the exact one
    assert settings_of(["mode=generate", f"model.path={of_half}"]).model.path == str(taken)


@pytest.mark.integration
def test_looking_for_a_folder_exports_nothing_and_a_following_training_takes_one_export(
    of_half: Path, words: list[str], tmp_path: Path
) -> None:
    runs = TinyRuns(tmp_path, words)
    before = {one.name for one in of_half.iterdir()}
    line = CommandLine(
        runs.settings_words(f"model.path={of_half}", f"output={tmp_path}", "resume=auto")
    )
    settings, _ = adapt_to_machine(settings_of(line), line)
    assert not (run_folder(settings, line) / "config.yaml").exists()
    assert not [one for one in of_half.iterdir() if one.name.startswith(exports.EXACT)]
    assert {one.name for one in of_half.iterdir()} - before <= {".export.lock"}

    begun = runs.finished(tmp_path / "sft", f"model.path={of_half}")
    (exported,) = of_half.glob(f"{exports.EXACT}*")
    assert read_settings(begun).model.path == str(exported)
    write_summary(begun, {**read_summary(begun), "status": "stopped"})
    settings, _ = adapt_to_machine(settings_of(line), line)
    assert run_folder(settings, line) == begun
    let_go(begun)


@pytest.mark.integration
def test_adapters_are_merged_in_float32_and_then_rounded(
    half: Path, words: list[str], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    run = TinyRuns(half.parent, [*words, f"model.path={half}"]).finished(
        tmp_path, "model.adapter=lora"
    )
    folder = flashtrain.export(run)
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32), folder / "adapter"
    ).merge_and_unload()
    exact = flashtrain.export(run, export={"dtype": "float32"})
    merged = written(exact)
    for name, one in theirs.state_dict().items():
        torch.testing.assert_close(merged[name], one, rtol=0, atol=1e-7)
    assert all(torch.equal(one, merged[name].bfloat16()) for name, one in written(folder).items())


@pytest.mark.integration
def test_decays_of_recurrences_are_not_rounded(
    half: Path, words: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "hybrid"
    shutil.copytree(half, place, ignore=shutil.ignore_patterns("*.safetensors"))
    hybrid("qwen3_next", torch.bfloat16, vocab_size=265).save_pretrained(place)
    run = TinyRuns(tmp_path, [*words, f"model.path={place}"]).finished(tmp_path)
    exact, folder = best(run), flashtrain.export(run)
    back = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, one in back.items():
        decay = name.endswith(("A_log", "dt_bias"))
        assert torch.equal(one, exact[name] if decay else exact[name].bfloat16().float()), name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_an_export_that_is_interrupted_leaves_none(name: str, of_half: Path, monkeypatch) -> None:
    before = {one.name for one in of_half.iterdir()}

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        exports, "_round" if name == "model.safetensors" else "save_tokenizer", stopped
    )
    with pytest.raises(KeyboardInterrupt):
        flashtrain.export(of_half)
    assert {one.name for one in of_half.iterdir()} == {*before, ".export.lock"}
    monkeypatch.undo()
    assert flashtrain.export(of_half) == of_half / "export"


def test_our_own_models_have_the_dtype_that_is_asked_for(trained: Path) -> None:
    exact, half = (
        flashtrain.export(trained, export={"dtype": dtype}) for dtype in (None, "bfloat16")
    )
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16
    rounded = written(half)
    assert all(torch.equal(one.bfloat16(), rounded[name]) for name, one in written(exact).items())
