"""hardware.plan_for: a plan for GPUs that are not here, its estimates beside
published peaks, and what fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from flashtrain.command import modes
from flashtrain.command.overrides import plain_words
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.report.rows import read_result
from flashtrain.run import machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.options import Gpu
from flashtrain.training.hardware import MEASURED_MFU, PLANNED_GPUS, planned_hardware
from flashtrain.training.memory import GIB

RESULTS = Path(__file__).parents[2] / "recipes" / "results"
PIECES = ("memory.ffn_chunk=16384", "memory.loss_chunk=2048", "memory.offload=true")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch) -> None:
    """This machine is not looked at."""
    monkeypatch.setattr(machine, "detect_hardware", None)


def plan_of(*words: str) -> str:
    line = CommandLine(plain_words(["mode=plan", *words]))
    return modes.plan(settings_of(line), line)


def gib_of(*words: str) -> float:
    found = re.search(r"^memory: ([\d.]+) GiB", plan_of(*words), re.MULTILINE)
    assert found is not None
    return float(found[1])


def measured(file: str, **values: object) -> float:
    (row,) = [
        one for one in read_result(RESULTS / f"{file}.json").rows if values.items() <= one.items()
    ]
    return row["peak_memory_gib"]


def one_sequence(context: int) -> tuple[str, str]:
    return f"context={context}", f"trainer.tokens_per_step={context}"


@pytest.mark.parametrize(
    "words",
    [
        ["gpt2"],
        ["bert"],
        ["lra-listops"],
        ["gpt2-long", "lengths.contexts=[1024,4096]"],
        ["gpt2", "model=llama", "stages=[{context:512,steps:9},{context:1024,steps:900}]"],
    ],
    ids=lambda words: words[-1].partition("=")[0],
)
def test_a_plan_has_the_seconds_of_its_trainings(words: list[str]) -> None:
    """As it prints them, for a job's time limit."""
    plan = plan_of(f"recipe={words[0]}", *words[1:], "hardware.plan_for=h100")
    printed = re.findall(r"^time: (?:at most )?about ([\d.]+) (s|min|h)", plan, re.MULTILINE)
    units = {"s": 1, "min": 60, "h": 3600}
    total = sum(float(number) * units[unit] for number, unit in printed)
    assert plan.seconds == pytest.approx(total, abs=31 * len(printed))  # it prints whole minutes
    assert plan.seconds > 0


def test_the_recipe_in_full_is_planned_for_eight_h100s() -> None:
    text = plan_of("recipe=gpt2", "hardware.plan_for=8xH100")
    assert text.startswith("gpt2-124m: 124.5M parameters, context 1024, attention flash")
    assert "on 8 x NVIDIA H100 80GB HBM3, bf16-mixed" in text
    assert "computed at an assumed 40% of the peak of 989 TFLOP/s" in text
    assert "has run on" not in text
    assert "leave out mode=plan and hardware.plan_for" in text


def test_a_gpu_that_flashtrain_never_ran_on_is_reported_to_be_one() -> None:
    assert "computed; flashtrain has run on H100 and H200 only." in plan_of(
        "recipe=bert", "hardware.plan_for=rtx4090"
    )


def test_the_gpus_are_those_of_the_setting_and_have_a_peak() -> None:
    assert set(PLANNED_GPUS) == set(get_args(Gpu))
    assert all(planned_hardware(name, 1).peak_flops for name in PLANNED_GPUS)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hardware.plan_for=h100"], r"hardware\.plan_for=h100 is used by mode=plan alone"),
        (["hardware.plan_for=4xb100", "mode=plan"], r"unknown hardware\.plan_for 'b100'"),
        (
            ["hardware.plan_for=8xh100", "mode=plan", "trainer.devices=4"],
            r"trainer\.devices is given twice",
        ),
    ],
)
def test_what_cannot_be_planned_is_a_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        settings_of(plain_words(["recipe=gpt2", *words]))


def test_the_share_of_the_peak_is_within_what_the_named_files_measured() -> None:
    files = ("gpt2-speed-h200", "hf-long-two-gpus-h200")
    shares = [
        row["mfu"]
        for file in files
        for row in read_result(RESULTS / f"{file}.json").rows
        if row["implementation"] == "flashtrain"
    ]
    assert MEASURED_MFU.startswith(f"{min(shares):.0%} to {max(shares):.0%}, ")
    assert all(file in MEASURED_MFU for file in files)


def test_rows_of_a_plan_have_one_micro_batch_and_its_parts_sum_to_the_peak() -> None:
    model = ("recipe=hf", "model.config=llama-8b", "model.adapter=lora", "data.tokenizer=gpt2")
    step = ("context=16384", "trainer.tokens_per_step=262144")
    text = plan_of(*model, *step, "hardware.plan_for=h200")
    rows = re.findall(r"checkpointing=.* ([\d.]+) GiB, micro-batch (\d+)", text)
    assert len(rows) == 5
    assert len({micro for _, micro in rows}) == 1
    needed = [float(gib) for gib, _ in rows]
    assert needed == sorted(needed, reverse=True)  # each saves more than the one before
    peak, parts = re.search(
        r"memory: ([\d.]+) GiB at the step's peak, then in use: (.*)", text
    ).groups()
    parts = parts.partition(", of it exchanged")[0].partition(", in host")[0]
    assert sum(map(float, re.findall(r"[\d.]+", parts))) == pytest.approx(float(peak), abs=0.04)


def test_gpus_that_are_too_small_are_offered_an_adapter_on_sharded_weights() -> None:
    wide = ("recipe=hf", "model.config=qwen3-8b", "data.tokenizer=gpt2")
    layers = "+model.options={num_hidden_layers: 220}"  # LoRA's frozen weights fit no single one
    text = plan_of(*wide, layers, "hardware.plan_for=8xh100", "trainer.strategy=ddp")
    assert re.search(r"^  model.adapter=lora trainer.strategy=fsdp: [\d.]+ GiB", text, re.M)


def test_one_small_card_is_offered_adapters_with_4_bits_and_shorter_contexts() -> None:
    small = (
        "recipe=hf",
        "model.config=qwen3-8b",
        "data.tokenizer=gpt2",
        "hardware.plan_for=rtx4090",
    )
    fits = plan_of(*small, "context=32768", "trainer.tokens_per_step=32768").partition(
        "does not fit: "
    )[2]
    assert "  model.adapter=lora model.quantize=nf4: " in fits
    long = plan_of(*small, "context=262144", "trainer.tokens_per_step=262144")
    assert re.search(r"  model.adapter=lora model.quantize=nf4 context=\d+: ", long)


def test_a_stage_that_does_not_fit_is_offered_a_shorter_context_in_its_entry() -> None:
    words = ("recipe=extend", "model.config=llama-8b", "data.tokenizer=bytes")
    text = plan_of(*words, "hardware.plan_for=rtx4090")
    assert "any of these (context and tokens_per_step in the stage's entry):" in text
    assert re.search(r"^  model.quantize=nf4: ", text, re.M)  # it has adapters already
    assert re.search(r"^  context=\d+: ", text, re.M)


def test_a_plan_of_absurdly_many_epochs_says_how_to_train_for_fewer(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("Call me Ishmael. " * 1000)
    words = ("recipe=gpt2", "hardware.plan_for=h100", "data=files", f"data.path={tmp_path}")
    assert "epochs at 4 bytes a token. Set trainer.epochs=3, or fewer" in plan_of(*words)
    assert "Set trainer.epochs" not in plan_of(*words, "trainer.steps=1")


def test_adapters_at_the_rate_of_all_weights_are_named() -> None:
    words = ("recipe=hf", "model.config=llama-8b", "hardware.plan_for=h100", "data.tokenizer=gpt2")
    named = "adapters at optimizer.learning_rate=1e-05"
    assert named in plan_of(*words, "model.adapter=lora")
    assert named not in plan_of(*words, "model.adapter=lora", "optimizer.learning_rate=1e-4")
    assert named not in plan_of(*words)


def test_conversations_are_planned_without_a_chat_template_and_trained_with_one(tmp_path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    words = ("recipe=sft", "model.config=llama-8b", "data.tokenizer=gpt2", f"data.path={chats}")
    assert "memory: " in plan_of(*words, "hardware.plan_for=h100")
    answers = {"mode=train": r"tokenizer\.$", "trainer.epochs=1": "or leave out trainer.epochs"}
    for more, answer in answers.items():
        with pytest.raises(UserError, match=f"chat template.*{answer}"):
            settings_of(CommandLine(plain_words(["mode=plan", *words, more][more[:4] == "mode" :])))


def test_changes_that_are_reported_to_fit_do() -> None:
    words = ("recipe=hf", "model.config=llama-8b", "hardware.plan_for=h100")
    text = plan_of(*words)
    assert re.search(
        r"does not fit: needs 12\d\.\d GiB, 71\.2 GiB may be used \(90% of what is free\)\.", text
    )
    changes = re.findall(r"^  ((?:[\w.]+=\w+ ?)+): ([\d.]+) GiB", text, re.MULTILINE)
    assert [change.split("=")[0] for change, _ in changes] == [
        "model.adapter",
        "trainer.devices",
        "trainer.devices",
    ]
    change, gib = changes[1]
    assert change == "trainer.devices=2 trainer.strategy=fsdp"
    assert f"{gib_of(*words, *change.split()):.1f}" == gib
    assert "does not fit: needs" not in plan_of(*words, *change.split())


@pytest.mark.parametrize(("size", "context", "batch"), [("1.3b", 2048, 16), ("124m", 65536, 1)])
def test_gpt2s_steps_need_what_was_measured_on_an_h200(size: str, context: int, batch: int) -> None:
    step = (
        f"context={context}",
        f"trainer.micro_batch={batch}",
        f"trainer.tokens_per_step={batch * context}",
    )
    peak = measured(
        "gpt2-speed-h200", implementation="flashtrain", model=size, context=context, weights="fp32"
    )
    found = gib_of("recipe=gpt2", f"model.size={size}", *step, "hardware.plan_for=h200")
    # The file is of compiled layers that saved the outputs of their two norms as well.
    layers, embed = {"124m": (12, 768), "1.3b": (24, 2048)}[size]
    found += 2 * layers * batch * context * embed * 2 / GIB
    assert peak <= found <= 1.1 * peak


def test_a_million_tokens_need_what_was_measured_on_an_h200() -> None:
    """Two steps were measured, the second with AdamW's moments."""
    peak = measured("gpt2-million-h200", model="gpt2-124m", devices=1)
    found = gib_of(
        "recipe=gpt2", "model.positions=rotary", *one_sequence(2**20), "hardware.plan_for=h200",
        "memory.activation_checkpointing=selective",
    )  # fmt: skip
    assert peak <= found <= 1.1 * peak


# The two rows of gpt2-million-h200 on two GPUs are of code whose ring held more,
# and are not compared.
@pytest.mark.integration
@pytest.mark.parametrize(
    ("file", "model", "context", "kind"),
    [
        ("hf-long-h100", "llama-1b", 954368, "full"),
        ("hf-long-h100", "llama-3b", 131072, "full"),
        ("hf-long-h100", "llama-8b-lora", 507904, "full"),
        ("hf-long-two-gpus-h200", "llama-3b", 131072, "full"),
        ("hf-long-two-gpus-h200", "qwen3-8b", 262144, "selective"),
    ],
)
def test_long_steps_need_what_was_measured(file: str, model: str, context: int, kind: str) -> None:
    pair = ("hardware.plan_for=2xh200", "context_parallel=2")
    on = ("hardware.plan_for=h100",) if file.endswith("h100") else pair
    lora = ("model.adapter=lora",) if model.endswith("lora") else ()
    peak = measured(file, implementation="flashtrain", model=model, context=context)
    words = (
        "recipe=hf",
        f"model.config={model.removesuffix('-lora')}",
        *one_sequence(context),
        *on,
        *lora,
        *PIECES,
    )
    assert peak <= gib_of(*words, f"memory.activation_checkpointing={kind}") <= 1.1 * peak
