"""What a run makes of the machine it finds itself on."""

from __future__ import annotations

import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.errors import UserError
from flashtrain.run import machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.training.hardware import Hardware, attention_for, precision_for


def gpu(capability: tuple[int, int], name: str = "NVIDIA H200", count: int = 1) -> Hardware:
    return Hardware(
        "cuda",
        name,
        count,
        capability,
        2**37,
        2**37,
        None,
        precision_for(capability),
        attention_for(capability),
    )


def cpu() -> Hardware:
    return Hardware("cpu", "a CPU", 2, None, 2**34, 2**34, None, "32-true", "sdpa")


@pytest.fixture
def adapted(monkeypatch, caplog):
    def on(hardware: Hardware, *words: str):
        monkeypatch.setattr(machine, "detect_hardware", lambda accelerator: hardware)
        line = CommandLine(["recipe=gpt2", *words])
        caplog.clear()
        with caplog.at_level("INFO"):
            settings, found = machine.adapt_to_machine(compose_settings(line), line)
        return settings, found, caplog.text

    return on


def test_a_gpu_trains_the_recipe_itself_in_bf16_with_our_kernels(adapted) -> None:
    settings, hardware, said = adapted(gpu((9, 0)))
    assert not settings.is_demo
    assert (settings.model.size, hardware.precision, hardware.attention, said) == (
        "124m",
        "bf16-mixed",
        "flash",
        "",
    )


def test_a_machine_without_a_gpu_trains_the_demo_and_reports_it_in_one_line(adapted) -> None:
    settings, _, said = adapted(cpu())
    assert settings.is_demo
    assert settings.model.size == "demo"
    (line,) = [line for line in said.splitlines() if "demo" in line]
    assert "no NVIDIA GPU found here" in line
    assert "gpt2-124m" in line  # what one would get with a GPU
    assert "found here: planning the recipe's small demo" in adapted(cpu(), "mode=plan")[2]


@pytest.mark.parametrize("mode", ["train", "plan"])
@pytest.mark.parametrize("word", ["model.size=355m", "model=llama", "hardware.demo=never"])
def test_who_asks_for_a_model_gets_it_on_a_cpu_too(adapted, word, mode) -> None:
    settings, _, said = adapted(cpu(), word, f"mode={mode}")
    assert not settings.is_demo
    asked = word.partition("=")[0]
    assert (f"{asked}= names a model, so the full recipe runs on this CPU" in said) == (
        "demo" not in asked
    )


def test_weights_that_are_not_there_are_reported_before_anything_is_built(adapted) -> None:
    with pytest.raises(UserError, match="weights=/nowhere"):
        adapted(cpu(), "weights=/nowhere")


def test_a_gpu_before_sm_80_gets_fp16_and_torchs_attention_with_a_line_each(adapted) -> None:
    _, hardware, said = adapted(gpu((7, 0), "Tesla V100-SXM2-16GB"))
    assert (hardware.precision, hardware.attention) == ("16-mixed", "sdpa")
    assert "float16" in said
    assert "sm_70" in said


def test_more_devices_than_there_are_is_refused(adapted) -> None:
    with pytest.raises(UserError, match=r"trainer\.devices=8, but this machine has 2"):
        adapted(gpu((9, 0), count=2), "trainer.devices=8")


def test_torchruns_number_of_processes_must_be_the_trainers(adapted, monkeypatch) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"torchrun started 4 processes.* Set trainer\.devices=4"):
        adapted(gpu((9, 0), count=4))
    assert adapted(gpu((9, 0), count=4), "trainer.devices=4")[0].trainer.devices == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # as many in all, but on two machines
    with pytest.raises(UserError, match=r"Set trainer\.devices=2 trainer\.nodes=2"):
        adapted(gpu((9, 0), count=4), "trainer.devices=4")


def test_several_machines_need_a_launcher_on_each(adapted, monkeypatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match=r"trainer\.nodes=2 needs a launcher on every machine"):
        adapted(gpu((9, 0)), "trainer.nodes=2")


def test_the_demo_the_attention_and_the_peak_can_be_given(adapted) -> None:
    settings, hardware, _ = adapted(
        gpu((9, 0)), "hardware.demo=always", "attention=standard", "hardware.peak_tflops=500"
    )
    assert (settings.model.size, hardware.attention, hardware.peak_flops) == (
        "demo",
        "standard",
        500e12,
    )
