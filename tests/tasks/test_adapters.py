"""A training that goes on from an adapter: a run of adapters, or a folder of peft's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from chat_folders import CHATML
from safetensors.torch import load_file
from tiny_runs import TinyRuns
from transformers import AutoModelForCausalLM

import flashtrain
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_settings, read_summary
from flashtrain.integrations.huggingface_model import build
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.model import ModelSettings
from flashtrain.training.checkpoints import read_checkpoint

peft = pytest.importorskip("peft")

STILL = ("optimizer.learning_rate=1e-30", "trainer.steps=1")  # the weights stay those of the start


@pytest.fixture(scope="session")
def exported(lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter alone of the run `lora`, as mode=export writes it for peft."""
    run = shutil.copytree(lora, tmp_path_factory.mktemp("exported") / "run")
    return flashtrain.export(run) / "adapter"


def adapters(run: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(run / "checkpoints" / "best.ckpt")["state_dict"]


def adapted(words: list[str], *given: str):
    """The settings, adapted to this machine, of a training with these words."""
    others = [word for word in words if not word.startswith("model.path")]
    line = CommandLine([*others, "hardware.demo=never", *given])
    return adapt_to_machine(settings_of(line), line)[0]


def refusal(words: list[str], *given: str) -> str:
    with pytest.raises(UserError) as error:
        adapted(words, *given)
    return str(error.value)


@pytest.mark.parametrize("given", ["run", "checkpoint", "weights", "peft", "beside"])
def test_an_adapter_goes_on_bit_for_bit_where_its_training_ended(
    given: str, lora: Path, exported: Path, base: Path, words: list[str], tmp_path: Path, caplog
) -> None:
    how = {
        "run": [f"model.path={lora}"],
        "checkpoint": [f"model.path={lora / 'checkpoints' / 'best.ckpt'}", "model.adapter=lora"],
        "weights": ["model.path=null", f"weights={lora}"],
        "peft": [f"model.path={exported}", "model.adapter_rank=16"],
        "beside": [f"model.path={base}", f"model.adapter_path={exported}"],
    }[given]
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    with caplog.at_level("INFO", "flashtrain"):
        run = TinyRuns(base.parent, words).finished(tmp_path / "next", *STILL, *how)
    begun, ended = adapters(run), adapters(lora)
    assert begun.keys() == ended.keys()
    assert all(torch.equal(one, begun[name]) for name, one in ended.items())
    row, first = read_summary(run), read_summary(lora)
    assert row["validation_loss"] == pytest.approx(first["validation_loss"], abs=1e-6)
    assert row["model"] == "llama"  # named after its base
    assert "the optimizer starts anew" in caplog.text
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    # Its own checkpoint is all that it needs from now on.
    own = read_settings(run).model
    assert (own.path, own.adapter_rank, own.adapter_alpha) == (str(base), 16, 32)


@pytest.mark.integration
def test_an_adapter_trains_on_as_peft_trains_it_on(
    exported: Path, base: Path, words: list[str], tmp_path: Path
) -> None:
    """Two steps of AdamW by torch, on the batches that the run read."""
    seen: list[dict[str, torch.Tensor]] = []
    from flashtrain.tasks import LanguageModel

    step = LanguageModel.training_step

    def recorded(self, batch, index):
        seen.append(dict(batch))
        return step(self, batch, index)

    quiet = ("schedule.name=constant", "schedule.warmup_steps=0", "optimizer.weight_decay=0",
             "optimizer.gradient_clip=0", "hardware.precision=32-true",
             "trainer.micro_batch=8", "data.document_mask=false")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "training_step", recorded)
        run = TinyRuns(base.parent, words).finished(
            tmp_path / "on", f"model.path={exported}", *quiet
        )
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        exported,
        is_trainable=True,
    )
    settings = read_settings(run).optimizer
    optimizer = torch.optim.AdamW(
        [one for one in theirs.parameters() if one.requires_grad],
        lr=settings.learning_rate,
        betas=tuple(settings.betas),
        eps=settings.epsilon,
        weight_decay=0,
    )
    assert len(seen) == 2
    for batch in seen:
        labels = batch["labels"]
        theirs(
            input_ids=batch["tokens"],
            position_ids=batch["positions"],
            labels=labels,
            shift_labels=labels,
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = flashtrain.export(run, export={"dtype": "float32"})
    wanted = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    found = load_file(ours / "adapter" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-5, msg=name)


def test_an_export_of_a_continued_adapter_is_pefts_merge_on_the_true_base(
    exported: Path, base: Path, words: list[str], tmp_path: Path
) -> None:
    run = TinyRuns(base.parent, words).finished(tmp_path / "next", f"model.path={exported}")
    whole = flashtrain.export(run, export={"dtype": "float32"})
    config = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), whole / "adapter"
    ).merge_and_unload()
    merged = load_file(whole / "model.safetensors")
    for name, one in theirs.state_dict().items():
        torch.testing.assert_close(merged[name], one, rtol=0, atol=1e-6, msg=name)
    alone = AutoModelForCausalLM.from_pretrained(whole / "adapter")  # transformers' own reading
    assert type(alone).__name__ == "LlamaForCausalLM"
    ids = torch.arange(60, 90)[None]
    with torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)


def test_an_exported_adapter_brings_the_template_that_its_base_has_not(
    base: Path, words: list[str], tmp_path: Path
) -> None:
    plain = shutil.copytree(base, tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "template.jinja").write_text(CHATML)
    given = ("model.adapter=lora", f"data.chat_template={tmp_path / 'template.jinja'}", *STILL)
    runs = TinyRuns(base.parent, [*words, f"model.path={plain}"])
    adapter = flashtrain.export(runs.finished(tmp_path / "run", *given)) / "adapter"
    with pytest.raises(AssertionError):  # the base's has no chat template
        runs.finished(tmp_path / "refused", f"model.path={adapter}")
    runs.finished(tmp_path / "next", f"model.path={adapter}", f"data.tokenizer={adapter}", *STILL)


def test_an_adapter_that_no_run_of_ours_trained_is_scored_and_asked(
    base: Path, tmp_path: Path
) -> None:
    """peft's own, with short names of layers and a scaling of its own."""
    model = AutoModelForCausalLM.from_pretrained(base)
    targets = {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 7}
    theirs = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **targets))
    torch.manual_seed(2)
    for name, one in theirs.named_parameters():
        if ".lora_" in name:
            one.data = 0.3 * torch.randn_like(one)
    theirs.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(60, 70)[None]
    settings = settings_of(["mode=generate", f"model.path={tmp_path / 'adapter'}", "hardware=cpu"])
    assert settings.model.adapter_targets == ["down_proj", "q_proj"]
    ours = build(settings.model, vocab_size=265, context=64)
    ours.materialise(torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(ids), theirs.eval()(input_ids=ids).logits, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("targets", ["q_proj", "q_proj,v_proj", r".*\.(q|v)_proj", "all-linear"])
def test_targets_are_those_that_peft_takes(targets: str, base: Path) -> None:
    settings = ModelSettings("huggingface", path=str(base), adapter="lora", adapter_targets=targets)
    settings.check()
    ours = {name for name, _ in build(settings, vocab_size=265, context=64).adapters}
    given = targets if "*" in targets or targets == "all-linear" else targets.split(",")
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(target_modules=given)
    )
    wanted = {name for name, one in theirs.named_modules() if hasattr(one, "lora_A")}
    assert {f"base_model.model.{name}" for name in ours} == wanted


def test_a_run_finds_its_base_from_another_working_folder(
    base: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    run = TinyRuns(tmp_path, words).finished(tmp_path / "run", f"model.path={base.name}")
    monkeypatch.chdir(tmp_path)
    assert flashtrain.load(run).settings.model.path == str(base)
    (config := run / "config.yaml").write_text(
        config.read_text().replace(f"path: {base}\n", f"path: {base.name}\n")
    )
    with pytest.raises(UserError, match=r"add model\.path=FOLDER"):  # an older run's, from here
        flashtrain.load(run)
    assert flashtrain.load(run, model={"path": str(base)}).model
    monkeypatch.chdir(base.parent)
    assert flashtrain.load(run).model


def test_settings_that_contradict_an_adapter_are_refused_with_both_values(
    lora: Path, exported: Path, words: list[str]
) -> None:
    for where in (lora, exported):
        said = refusal(words, f"model.path={where}", "model.adapter=lora", "model.adapter_rank=8")
        assert "model.adapter_rank=8" in said
        assert "has 16" in said
        said = refusal(words, f"model.path={where}", "model.adapter=lora", "model.adapter_alpha=8")
        assert "has 32" in said
        said = refusal(
            words, f"model.path={where}", "model.adapter=lora", "model.adapter_targets=[q_proj]"
        )
        assert "model.adapter_targets=['q_proj']" in said
    # Dropout is of a training, not of what was trained.
    given = ("model.adapter=lora", "model.adapter_dropout=0.1")
    assert adapted(words, f"model.path={exported}", *given).model.adapter_dropout == 0.1
    assert "has lora" in refusal(words, f"model.path={exported}", "model.adapter=null")


def test_an_adapter_that_cannot_go_on_is_refused_with_the_reason(
    exported: Path, base: Path, words: list[str], tmp_path: Path
) -> None:
    def changed(name: str, **content: object) -> Path:
        folder = shutil.copytree(exported, tmp_path / name)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
        return folder

    dora = changed("dora", use_dora=True, modules_to_save=["lm_head"])
    said = refusal(words, f"model.path={dora}")
    assert "use_dora" in said
    assert "modules_to_save" in said
    moved = changed("moved", base_model_name_or_path="/nowhere/base")
    assert adapted(words, f"model.path={moved}").model.path == "/nowhere/base"  # which is not here
    found = adapted(words, f"model.path={base}", f"model.adapter_path={moved}").model
    assert (found.path, found.adapter_path) == (str(base), str(moved))
    wrong = adapted(words, f"model.path={base}", f"model.adapter_path={base}").model
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        build(wrong, vocab_size=265, context=64)
    small = adapted(words, f"model.path={changed('small', r=4)}").model
    with pytest.raises(UserError, match="do not match the model's"):
        build(small, vocab_size=265, context=64)


def test_an_adapter_brings_the_scaling_that_it_was_trained_with(
    base: Path, words: list[str], tmp_path: Path
) -> None:
    """In a run's settings, and beside the adapter alone."""
    scaled = ("model.rope=yarn", "model.rope_factor=4")
    run = TinyRuns(base.parent, words).finished(
        tmp_path / "scaled", "model.adapter=lora", *scaled, "context=512",
        "trainer.tokens_per_step=1024",
    )  # fmt: skip
    alone = flashtrain.export(run) / "adapter"
    wanted = read_settings(run).model
    for where in (run, alone):
        model = adapted(words, f"model.path={where}").model
        ours = [build(one, vocab_size=265, context=512).config for one in (wanted, model)]
        assert ours[0].rope_parameters["factor"] == 4
        assert ours[0].rope_parameters == ours[1].rope_parameters
        longer = adapted(words, f"model.path={where}", "model.rope=yarn", "model.rope_factor=8")
        assert (
            build(longer.model, vocab_size=265, context=512).config.rope_parameters["factor"] == 8
        )


@pytest.mark.integration
def test_a_run_goes_on_without_the_adapter_that_it_began_with(
    exported: Path, base: Path, words: list[str], tmp_path: Path
) -> None:
    first = shutil.copytree(exported, tmp_path / "first")
    runs = TinyRuns(base.parent, words)
    run = runs.finished(tmp_path / "next", f"model.path={first}")
    words_again = runs.settings_words(f"model.path={first}", "trainer.steps=3", f"resume={run}")
    status, again = runs.run("again", *words_again)  # the whole command, with resume=
    assert (status, read_summary(again)["steps"]) == (0, 3)
    shutil.rmtree(first)
    assert flashtrain.export(run).is_dir()
    again = [f"resume={run}", "trainer.steps=3", f"hydra.run.dir={tmp_path / 'again'}"]
    ended = TinyRuns(tmp_path, []).command(*again)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_summary(tmp_path / "again")["steps"] == 3


def test_a_training_from_merged_weights_is_named_after_the_model_too(
    exported: Path, words: list[str], base: Path
) -> None:
    merged = adapted(words, f"model.path={exported.parent}", "model.adapter=lora")
    assert merged.model.label == base.name
