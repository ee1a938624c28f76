"""recipe=hf on a folder: trained, resumed, evaluated, asked for text, exported;
adapters; mistakes in a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import transformers
from forked_commands import run
from hybrid_models import CONFIGS, hybrid
from tiny_runs import TINY, TinyRuns

from flashtrain import registry
from flashtrain.command.checkpoint_settings import settings_from_checkpoint
from flashtrain.command.modes import run_mode
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.errors import UserError
from flashtrain.training.checkpoints import read_checkpoint

pytestmark = pytest.mark.integration  # whole runs

NOT_GIVEN = ("recipe=", "model.size=", "model.vocab_rows=", "data.tokenizer=")
SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def save_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(ByteTokenizer().library_form().to_str())
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A tiny Llama with its tokenizer, chat template and generation config, in shards."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.generation_config.max_length = 77
    model.save_pretrained(folder, max_shard_size="40KB")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_folder, llama) -> TinyRuns:
    words = [word for word in TINY if not word.startswith(NOT_GIVEN)]
    folder = tmp_path_factory.mktemp("hf-runs")
    return TinyRuns(
        folder,
        [
            "recipe=hf",
            *words,
            f"data.path={text_folder}",
            f"data.cache_dir={folder}",
            f"model.path={llama}",
        ],
    )


@pytest.fixture(scope="module")
def trained(runs: TinyRuns) -> Path:
    status, folder = runs.run("trained", "data.document_mask=true")
    assert status == 0
    return folder


@pytest.fixture(scope="module")
def adapted(runs: TinyRuns) -> Path:
    status, folder = runs.run(
        "adapted",
        "model.adapter=lora",
        "model.adapter_rank=4",
        "memory.activation_checkpointing=selective",
    )
    assert status == 0
    return folder


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def mode(name: str, folder: Path, *words: str) -> int:
    words = (f"mode={name}", f"checkpoint={folder}", "hardware=cpu", *words)
    return run_mode(settings_from_checkpoint(list(words)))


def state(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def test_a_run_learns_and_its_row_names_the_model(trained: Path) -> None:
    row = summary(trained)
    assert (row["status"], row["model"], row["steps"]) == ("finished", "tiny-llama", 6)
    assert row["train_loss"] < row["train_loss_first"]
    assert row["validation_loss"] < row["train_loss_first"]


def of_hybrid(kind: str, folder: Path) -> list[str]:
    """The settings that train a tiny hybrid from random weights."""
    config = {"model_type": kind, **CONFIGS[kind], "vocab_size": 264}
    (folder / "config.json").write_text(json.dumps(config))
    return ["model.path=null", f"model.config={folder}", "data.tokenizer=bytes"]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h"])
def test_a_hybrid_trains_on_packed_documents(runs: TinyRuns, kind: str, tmp_path: Path) -> None:
    status, folder = runs.run(
        f"packed-{kind}", *of_hybrid(kind, tmp_path),
        "data.document_mask=true", "trainer.steps=2", "memory.activation_checkpointing=full",
    )  # fmt: skip
    row = summary(folder)
    assert (status, row["status"], row["steps"]) == (0, "finished", 2)


class SignalAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "qwen3_next", "nemotron_h", "kimi_linear"])
def test_two_devices_share_each_sequence_and_learn_what_one_does(
    kind: str, runs: TinyRuns, tmp_path: Path
) -> None:
    own = {"full": [], "lora": ["model.adapter=lora", "model.adapter_rank=4"]}
    if kind not in own:  # from weights with slow decays, whose gradients are more than rounding
        hybrid(kind, torch.float32, vocab_size=264).save_pretrained(tmp_path / kind)
        save_tokenizer(tmp_path / kind)
        own[kind] = [f"model.path={tmp_path / kind}"]
    words = (
        *own[kind],
        "data.document_mask=true",
        "trainer.compile=false",
        "hardware.precision=32-true",
    )
    status, one = runs.run(f"one-device-{kind}", *words)
    assert status == 0
    two = tmp_path / "two"
    both = ("trainer.devices=2", "context_parallel=2", f"hydra.run.dir={two}")
    run(runs.settings_words(*words, *both), tmp_path / "printed", ranks=2)
    assert summary(two)["train_loss"] == pytest.approx(summary(one)["train_loss"], rel=1e-5)
    assert summary(two)["validation_loss"] == pytest.approx(
        summary(one)["validation_loss"], rel=1e-5
    )
    mine, theirs = state(one), state(two)
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(value, mine[name], atol=1e-4) for name, value in theirs.items())


def test_a_checkpoint_is_evaluated_and_writes_text(
    trained: Path, adapted: Path, caplog, capsys
) -> None:
    for folder in (trained, adapted):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert mode("evaluate", folder) == 0
        assert f"held-out loss {summary(folder)['validation_loss']:.3f}" in caplog.text
        assert mode("generate", folder, "prompt='document '", "generate.max_new_tokens=5") == 0
        assert capsys.readouterr().out.startswith("document ")


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
        ids
    ).logits


def test_an_export_is_what_from_pretrained_loads_with_tokenizer_and_generation_config(
    trained: Path, llama: Path
) -> None:
    assert mode("export", trained) == 0
    folder = trained / "export"
    back = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(back) is transformers.LlamaForCausalLM
    best = read_checkpoint(trained / "checkpoints" / "best.ckpt")["state_dict"]
    for name, value in back.state_dict().items():
        assert torch.equal(value, best[f"model.{name}"]), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("the fox").input_ids) == "the fox"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert back.generation_config.max_length == 77
    files = [folder / "generation_config.json" for folder in (trained / "export", llama)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_adapters_are_exported_merged_and_alone_as_peft_reads_them(
    adapted: Path, llama: Path
) -> None:
    peft = pytest.importorskip("peft")
    assert all(".lora_" in name for name in state(adapted))
    assert mode("export", adapted) == 0
    ids = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(0))
    merged = logits(adapted / "export", ids)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    alone = peft.PeftModel.from_pretrained(base, adapted / "export" / "adapter")
    torch.testing.assert_close(alone(ids).logits, merged, rtol=0, atol=1e-5)
    assert not torch.allclose(merged, logits(llama, ids), atol=1e-5)
    written = json.loads((adapted / "export" / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["base_model_name_or_path"]) == (
        4,
        8,
        str(llama),
    )


def refused(runs: TinyRuns, capsys, caplog, *words: str) -> str:
    """The line with which a run ends before any text is read."""
    caplog.clear()
    try:
        status, _ = runs.run("refused", *words)
    except UserError as error:  # of the settings alone
        return str(error)
    assert status != 0
    assert "documents" not in caplog.text
    return [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("flashtrain: ")
    ][-1]


def test_weights_that_do_not_fit_are_reported_in_a_line(runs: TinyRuns, tmp_path, capsys) -> None:
    """On one device too, where Lightning's teardown then fails on the model without weights."""
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    ).save_pretrained(tmp_path)
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    status, _ = runs.run("odd", f"model.path={tmp_path}")
    assert status == 2
    assert "'model.layers.1.input_layernorm.weight' is missing" in capsys.readouterr().err


def test_mistakes_are_reported_in_a_line_before_any_text_is_read(
    runs: TinyRuns, llama: Path, tmp_path, capsys, caplog
) -> None:
    def changed(name: str, **content) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in llama.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, **content}))
        return folder

    small = changed("small", vocab_size=200)
    assert "the tokenizer has 257 tokens" in refused(runs, capsys, caplog, f"model.path={small}")
    speechless = changed("speechless")
    (speechless / "tokenizer.json").unlink()
    assert f"no tokenizer.json in {speechless}" in refused(
        runs, capsys, caplog, f"model.path={speechless}"
    )
    assert "model.path" in refused(runs, capsys, caplog, "model.config=llama")


@pytest.mark.slow  # torchao compiles its step
def test_states_of_8_bits_train_on_exactly_and_their_checkpoint_is_read_without_them(
    runs: TinyRuns, monkeypatch
) -> None:
    pytest.importorskip("torchao")  # an extra of its own, which CI does not install
    words = ("optimizer.states=8bit", "optimizer.learning_rate=0.001")
    status, whole = runs.run("whole-8bit", *words)
    assert status == 0
    monkeypatch.setitem(registry._components["callback"], "stop", lambda _: SignalAt(4))
    _, folder = runs.run("stopped-8bit", *words, "trainer.callbacks=[stop]")
    status, resumed = runs.run("resumed-8bit", *words, f"resume={folder}")
    assert status == 0
    expected = state(whole)
    assert all(torch.equal(value, expected[name]) for name, value in state(resumed).items())
    code = (
        "import sys; from flashtrain.training.checkpoints import read_checkpoint; "
        "read_checkpoint(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(whole / "checkpoints" / "last.ckpt")], check=True
    )


@pytest.mark.slow
def test_sharded_states_of_8_bits_go_on_exactly_and_rows_that_devices_cannot_share_are_refused(
    runs: TinyRuns, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")

    def train(kind: str, rows: int, *words: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        model = tmp_path / f"{rows}-rows"
        if not model.exists():
            torch.manual_seed(0)
            config = transformers.LlamaConfig(**{**SIZES, "vocab_size": rows})
            transformers.LlamaForCausalLM(config).save_pretrained(model)
            save_tokenizer(model)
        words = (
            f"model.path={model}",
            "optimizer.states=8bit",
            "optimizer.learning_rate=0.01",
            *words,
        )
        sharded = (
            "trainer.devices=2",
            "trainer.strategy=fsdp",
            "schedule.name=constant",
            f"output={tmp_path / kind}",
        )
        return runs.command(*words, *sharded), tmp_path / kind

    ended, folder = train("whole", 512, "trainer.steps=4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (whole,) = (folder / "hf").iterdir()
    _, folder = train("half", 512, "trainer.steps=2")
    (half,) = (folder / "hf").iterdir()
    held = read_checkpoint(half / "checkpoints" / "last.ckpt")["optimizer_states"][0]["state"]
    assert {type(value) for one in held.values() for value in one.values()} == {torch.Tensor}
    ended, _ = train("half", 512, "trainer.steps=4", f"resume={half}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = state(whole)
    assert all(torch.equal(value, expected[name]) for name, value in state(half).items())
    ended, _ = train("odd", 265, "trainer.steps=2")
    assert ended.returncode == 2
    output = ended.stdout + ended.stderr
    assert "embed_tokens.weight has 265 rows. Use optimizer.states=full" in output
