"""Adapt the settings of a command to the machine on which it runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from flashtrain.announce import quieten, say
from flashtrain.errors import UserError
from flashtrain.folders.run_lock import slurm_job
from flashtrain.mode import check_settings, modes, working_mode
from flashtrain.settings.command_line import CommandLine
from flashtrain.settings.schema import (
    setting_names,
    settings_config,
    typed_settings,
    unknown_setting,
)
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.training.hardware import Hardware, detect_hardware, planned_hardware


def adapt_to_machine(
    settings: Settings, line: CommandLine, report: Callable[..., None] = say
) -> tuple[Settings, Hardware]:
    """Adapt composed settings to this machine: the recipe's demo if there is no
    GPU, precision, attention.

    Args:
        settings: the composed settings.
        line: the command line; a setting that it names is not replaced by the demo's.
        report: called with each line about what was decided, and with logging.WARNING if it is a
            warning.

    Returns:
        The settings to run, and the machine's hardware.

    Raises:
        UserError: the settings cannot be run on this machine.
    """
    quieten()
    if settings.hardware.plan_for is None:
        hardware = detect_hardware(settings.hardware.accelerator)
    else:
        hardware = planned_hardware(settings.hardware.plan_for, settings.trainer.devices)
    given = set(line.by_name)
    if not settings.is_demo and _wants_demo(settings, hardware, given):
        why = "no NVIDIA GPU found here" if hardware.kind == "cpu" else "hardware.demo=always"
        full, settings = settings, apply_demo(settings, given)
        level = logging.INFO if full.hardware.demo == "always" else logging.WARNING
        report(f"{why}: {_demo_line(full, settings)}", level)
    elif hardware.kind == "cpu" and settings.mode in ("train", "plan") and not settings.is_demo:
        requested = " and ".join(f"{name}=" for name in sorted(_OF_A_MODEL & given))
        if requested and settings.demo and settings.hardware.demo == "auto":
            report(
                f"{requested} names a model, so the full recipe runs on this CPU. "
                "Its demo: hardware.demo=always"
            )
    if settings.mode in ("train", "plan"):
        if settings.weights is not None and not Path(settings.weights).expanduser().exists():
            raise UserError(f"weights={settings.weights}: no such folder or file.")
        settings = deepcopy(settings)
        for one in task_of(settings).suit_weights(settings, given):
            report(one)
    if settings.mode == "train":
        settings.logger.check_installed()
        _check_processes(settings)
    wanted = settings.trainer.devices
    studies = [name for name, mode in modes().items() if mode.study]
    if (
        hardware.kind == "cuda"
        and wanted > hardware.count
        and settings.mode in ("train", "plan", *studies)
    ):
        raise UserError(
            f"trainer.devices={wanted}, but this machine has {hardware.count} GPUs. "
            f"Set trainer.devices={hardware.count} or less."
        )
    if settings.hardware.peak_tflops is not None:
        hardware = replace(hardware, peak_flops=settings.hardware.peak_tflops * 1e12)
    if _measures(settings):
        return settings, hardware
    if settings.hardware.precision is not None:
        hardware = replace(hardware, precision=settings.hardware.precision)
    if settings.shares_sequences and settings.mode in ("train", "plan"):
        hardware = _for_context(hardware)
    if settings.attention.name != "flash":
        hardware = replace(hardware, attention=settings.attention.name)
    elif hardware.attention != "flash" and hardware.kind == "cuda":  # on a CPU the kernels say so
        report(
            "attention=flash needs an NVIDIA GPU of sm_80 or later and Triton; "
            f"{_name(hardware)} uses torch SDPA."
        )
    if (
        hardware.kind == "cuda"
        and hardware.precision == "16-mixed"
        and settings.hardware.precision is None
    ):
        report(
            f"{_name(hardware)} has no bfloat16 tensor cores: "
            "training in float16 with loss scaling."
        )
    if settings.mode in ("train", "plan"):
        task_of(settings).check_step(settings, given)
    return settings, hardware


def apply_demo(settings: Settings, given: Collection[str]) -> Settings:
    """Return the settings with the values of the recipe's demo, except for settings
    that are `given` by name."""
    known = set(setting_names(settings.task))
    unchanged = {*given} | settings.kept_in_demo() | ({"data.source"} if "data" in given else set())
    changed = settings_config(settings)
    for name, value in settings.demo.items():
        if name not in unchanged:
            if name not in known:
                raise unknown_setting(name, settings.task)
            OmegaConf.update(changed, name, value)
    changed.is_demo = True
    demo = typed_settings(changed)
    task_of(demo).suit_demo(demo, given)
    check_settings(demo)
    return demo


# Whoever gives one of these has a model in mind that the demo's would stand in the way of.
_OF_A_MODEL = {"model", "bert.size", "weights"}
_OF_A_MODEL |= {f"model.{one}" for one in ("name", "size", "path", "config")}


def _for_context(hardware: Hardware) -> Hardware:
    """Return the hardware with attention=flash, which context parallelism needs, on a CPU too.
    Raises UserError for a GPU that cannot run it."""
    if hardware.kind == "cuda" and hardware.attention != "flash":
        raise UserError(
            "trainer.strategy=context_parallel needs attention=flash, so GPUs of sm_80 or later "
            f"and Triton, and this is {_name(hardware)}. Use trainer.strategy=ddp or fsdp."
        )
    return replace(hardware, attention="flash")


def _check_processes(settings: Settings) -> None:
    """Raise UserError if trainer.devices and trainer.nodes are not the numbers of processes and
    machines that torchrun has started, or if several nodes have no launcher."""
    devices, nodes = settings.trainer.devices, settings.trainer.nodes
    if "TORCHELASTIC_RUN_ID" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        started = int(os.environ["WORLD_SIZE"]) // here
        if (here, started) != (devices, nodes):
            raise UserError(
                f"torchrun started {here} processes on each of {started} machine(s), but "
                f"trainer.devices={devices} trainer.nodes={nodes}. Set trainer.devices={here} "
                f"trainer.nodes={started}."
            )
    elif nodes > 1 and slurm_job() is None and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"trainer.nodes={nodes} needs a launcher on every machine: torchrun --nnodes={nodes} "
            f"--nproc-per-node={devices} ... -m flashtrain ..., or srun with a task for each GPU."
        )


def _wants_demo(settings: Settings, hardware: Hardware, given: Collection[str]) -> bool:
    if not settings.demo or settings.hardware.demo != "auto":
        return bool(settings.demo) and settings.hardware.demo == "always"
    return hardware.kind == "cpu" and (_measures(settings) or not _OF_A_MODEL & set(given))


def _measures(settings: Settings) -> bool:
    mode = working_mode(settings)
    return mode is not None and mode.measures


def _demo_line(full: Settings, demo: Settings) -> str:
    """Return a line on what the demo does instead of the recipe, and how to run the recipe in
    full."""
    where = "run the same command on a machine with an NVIDIA GPU, or add hardware.demo=never."
    mode = working_mode(demo)
    if mode is not None and mode.measures:
        return mode.demo_line(demo, where)
    return (
        f"{'planning' if demo.mode == 'plan' else 'training'} "
        f"{task_of(demo).demo_line(full, demo, where)}"
    )


def _name(hardware: Hardware) -> str:
    return f"{hardware.name} (sm_{''.join(map(str, hardware.capability or ()))})"
