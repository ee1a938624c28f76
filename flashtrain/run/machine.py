"""What a run is given by the machine it is on: device, precision, attention, and the recipe's demo without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from flashtrain.command import announce
from flashtrain.command.compose import apply_demo, override_keys
from flashtrain.errors import UserError
from flashtrain.run.context_run import check_heads
from flashtrain.settings.context_settings import CONTEXT
from flashtrain.settings.settings import Settings
from flashtrain.tasks.fine_tuning.steps import check_fine_tuning_step
from flashtrain.tasks.masked_language.steps import check_masked_step
from flashtrain.training.hardware import Hardware, detect_hardware
from flashtrain_recipes.arena.stages import check_heeded, stages_of
from flashtrain_recipes.arena.words import trained_line


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
    wanted = settings.trainer.devices
    if hardware.kind == "cuda" and wanted > hardware.count and settings.mode in ("train", "plan", "lengths"):
        raise UserError(f"trainer.devices={wanted}, but this machine has {hardware.count}: choose at most that many.")
    _check_processes(settings)
    if settings.hardware.peak_tflops is not None:
        hardware = replace(hardware, peak_flops=settings.hardware.peak_tflops * 1e12)
    if settings.benchmark.name is not None or is_preview(settings):
        # What measures takes every attention in a dtype of its own; a preview computes none.
        return settings, hardware
    if settings.hardware.precision is not None:
        hardware = replace(hardware, precision=settings.hardware.precision)
    if settings.strategy == CONTEXT and settings.mode in ("train", "plan"):
        hardware = _for_context(hardware)
        check_heads(settings)
    if settings.attention.name != "flash":
        hardware = replace(hardware, attention=settings.attention.name)
    elif hardware.attention != "flash":
        say(f"attention=flash needs an NVIDIA GPU of sm_80 or later and Triton; {_name(hardware)} takes torch's SDPA.")
    if hardware.kind == "cuda" and hardware.precision == "16-mixed" and settings.hardware.precision is None:
        say(f"{_name(hardware)} has no bfloat16 tensor cores: training in float16 with loss scaling.")
    if settings.mode in ("train", "plan"):
        if settings.task == "classification":
            check_heeded(settings, given)
        _CHECK_STEP[settings.task](settings)
    return settings, hardware


def is_preview(settings: Settings) -> bool:
    """Whether images are drawn and nothing is trained; true of such a recipe's mode=plan too."""
    return settings.mode == "preview" or (settings.mode == "plan" and settings.pathfinder.preview is not None)


# Whoever gives one of these has a model in mind that the demo's would stand in the way of.
_OF_A_MODEL = {"model", "model.name", "model.size", "bert.size", "weights"}

_CHECK_STEP: dict[str, Callable[[Settings], object]] = {
    "language_model": Settings.check_step,
    "classification": stages_of,
    "masked_language_model": check_masked_step,
    "fine_tuning": check_fine_tuning_step,
}


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
    if settings.benchmark.name is not None:
        return hardware.kind == "cpu"
    return hardware.kind == "cpu" and not _OF_A_MODEL & set(given)


def _demo_line(full: Settings, demo: Settings) -> str:
    """What the demo does in the recipe's place, and how to have the recipe in full."""
    where = "run the same command on a machine with an NVIDIA GPU, or add hardware.demo=never."
    if demo.benchmark.name is not None:
        asked = demo.benchmark
        if asked.name == "step":
            sizes = f"{', '.join(asked.models)}, contexts to {max(asked.contexts):,}"
            limit = f", {asked.max_seconds:g} s at most" if asked.max_seconds else ""
            return f"measuring steps of a small model ({sizes}{limit}). For the recipe in full, {where}"
        if asked.name == "bert":
            limit = f", {asked.max_seconds:g} s at most" if asked.max_seconds else ""
            return (
                f"measuring steps of a small BERT ({', '.join(asked.models)}{limit}). For the recipe in full, {where}"
            )
        if asked.name == "context":
            lengths = ", ".join(map(str, asked.seqlens or []))
            limit = f", {asked.max_seconds:g} s at most" if asked.max_seconds else ""
            return (
                f"measuring two processes that share short sequences ({lengths} tokens, {asked.dtype}{limit}). "
                f"For the recipe in full, {where}"
            )
        if asked.name == "sequence":
            return f"measuring sequences of up to {asked.longest} tokens. For the recipe in full, {where}"
        limits = [f"lengths to {asked.longest}" if asked.longest else "", asked.dtype]
        limits += [f"{asked.max_seconds:g} s at most" if asked.max_seconds else ""]
        told = ", ".join(part for part in limits if part)
        return f"measuring small shapes through torch's CPU backends ({told}). For the recipe in full, {where}"
    if demo.task == "classification":
        return (
            f"training the recipe's small demo instead ({trained_line(demo)}). "
            f"For the recipe in full ({trained_line(full)}), {where}"
        )
    if demo.task in ("masked_language_model", "fine_tuning"):
        trained, meant = (f"{one.bert.family}-{one.bert.size}, {_contexts(one)}" for one in (demo, full))
        full_size = f" ({meant})" if meant != trained else ""
        return f"training the recipe's small demo instead ({trained}). For the recipe in full{full_size}, {where}"
    recipe = f"the recipe in full ({full.model.name}-{full.model.size}, {_contexts(full)})"
    return (
        f"training the recipe's small demo model instead ({demo.data.tokenizer} as tokens, {_contexts(demo)}). "
        f"For {recipe}, {where}"
    )


def _contexts(settings: Settings) -> str:
    """The context in words, or those that mode=lengths compares."""
    if settings.mode == "lengths" and settings.lengths.contexts:
        return f"contexts {min(settings.lengths.contexts)} to {max(settings.lengths.contexts)}"
    return f"context {settings.context}"


def _name(hardware: Hardware) -> str:
    if hardware.capability is None:
        return "this CPU"
    return f"{hardware.name} (sm_{hardware.capability[0]}{hardware.capability[1]})"
