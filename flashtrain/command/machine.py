"""What a run is given by the machine it is on: device, precision, attention, and the recipe's demo without a GPU."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from flashtrain import announce
from flashtrain.command.compose import apply_demo, override_keys
from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings
from flashtrain.spec import modes, task_of, work_of
from flashtrain.tasks.context_run import check_heads
from flashtrain.training.hardware import Hardware, detect_hardware


def settle(settings: Settings, overrides: Sequence[str], *, quiet: bool = False) -> tuple[Settings, Hardware]:
    """The settings as this machine can run them, and the machine.

    overrides: the command line's, which the demo never replaces.
    Says one line for each decision that a user would want to know of, unless quiet.
    Raises UserError for settings that cannot be run here.
    """
    say = _nothing if quiet else announce.say
    hardware = detect_hardware(settings.hardware.accelerator)
    given = override_keys(overrides)
    if not settings.is_demo and _wants_demo(settings, hardware, given):
        why = "no NVIDIA GPU found here" if hardware.kind == "cpu" else "hardware.demo=always"
        full, settings = settings, apply_demo(settings, overrides)
        say(f"{why}: {_demo_line(full, settings)}")
    elif hardware.kind == "cpu" and settings.mode == "train" and settings.demo and settings.hardware.demo == "auto":
        asked = " and ".join(f"{name}=" for name in sorted(_OF_A_MODEL & given))
        if asked and not settings.is_demo:
            say(f"{asked} asks for a model, so the recipe runs in full on this CPU; hardware.demo=always has its demo.")
    if settings.mode == "train" and settings.weights is not None and not Path(settings.weights).expanduser().exists():
        raise UserError(f"no weights at {settings.weights}: no such folder or file.")
    wanted, studies = settings.trainer.devices, [name for name, mode in modes().items() if mode.study]
    if hardware.kind == "cuda" and wanted > hardware.count and settings.mode in ("train", "plan", *studies):
        raise UserError(f"trainer.devices={wanted}, but this machine has {hardware.count}: choose at most that many.")
    _check_processes(settings)
    if settings.hardware.peak_tflops is not None:
        hardware = replace(hardware, peak_flops=settings.hardware.peak_tflops * 1e12)
    mode = modes().get(work_of(settings))
    if mode is not None and mode.measures:
        return settings, hardware
    if settings.hardware.precision is not None:
        hardware = replace(hardware, precision=settings.hardware.precision)
    if settings.shares_sequences and settings.mode in ("train", "plan"):
        hardware = _for_context(hardware)
        check_heads(settings)
    if settings.attention.name != "flash":
        hardware = replace(hardware, attention=settings.attention.name)
    elif hardware.attention != "flash":
        say(f"attention=flash needs an NVIDIA GPU of sm_80 or later and Triton; {_name(hardware)} takes torch's SDPA.")
    if hardware.kind == "cuda" and hardware.precision == "16-mixed" and settings.hardware.precision is None:
        say(f"{_name(hardware)} has no bfloat16 tensor cores: training in float16 with loss scaling.")
    if settings.mode in ("train", "plan"):
        task_of(settings).check_step(settings, given)
    return settings, hardware


# Whoever gives one of these has a model in mind that the demo's would stand in the way of.
_OF_A_MODEL = {"model", "model.name", "model.size", "bert.size", "weights"}


def _for_context(hardware: Hardware) -> Hardware:
    """The machine, with the attention that devices can share: ours, on a CPU too. UserError: a GPU without it."""
    if hardware.kind == "cuda" and hardware.attention != "flash":
        raise UserError(
            "trainer.strategy=context needs attention=flash, so GPUs of sm_80 or later and Triton, and this is "
            f"{_name(hardware)}: choose trainer.strategy=ddp or fsdp."
        )
    return replace(hardware, attention="flash")


def _check_processes(settings: Settings) -> None:
    """torchrun has started its processes already; trainer.devices and trainer.nodes must say the same number."""
    started = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    wanted = settings.trainer.ranks
    if started is not None and int(started) != wanted and settings.mode == "train":
        raise UserError(
            f"torchrun started {started} processes, but trainer.devices x trainer.nodes is {wanted}: "
            f"say trainer.devices={os.environ.get('LOCAL_WORLD_SIZE', started)}, and trainer.nodes for more machines."
        )


def _nothing(line: str) -> None:
    """Says nothing, for settling before it is known that anything will run."""


def _wants_demo(settings: Settings, hardware: Hardware, given: Collection[str]) -> bool:
    if not settings.demo or settings.hardware.demo == "never":
        return False
    if settings.hardware.demo == "always":
        return True
    if any(mode.measures and mode.is_asked(settings) for mode in modes().values()):
        return hardware.kind == "cpu"
    return hardware.kind == "cpu" and not _OF_A_MODEL & set(given)


def _demo_line(full: Settings, demo: Settings) -> str:
    """What the demo does in the recipe's place, and how to have the recipe in full."""
    where = "run the same command on a machine with an NVIDIA GPU, or add hardware.demo=never."
    mode = next((mode for mode in modes().values() if mode.measures and mode.is_asked(demo)), None)
    if mode is not None:
        return mode.demo_line(demo, where)
    return task_of(demo).demo_line(full, demo, where)


def _name(hardware: Hardware) -> str:
    if hardware.capability is None:
        return "this CPU"
    return f"{hardware.name} (sm_{hardware.capability[0]}{hardware.capability[1]})"
