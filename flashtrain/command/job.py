"""One job, from composed settings to the exit status. However it ends, summary.json has a row about it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashtrain import announce
from flashtrain.announce import is_first_rank, log, quieten, say
from flashtrain.command.compose import FOLDER, apply_demo, overrides_by_name
from flashtrain.command.failures import note_log, say_failure
from flashtrain.errors import RunFailed, UserError, causes, first_line
from flashtrain.folders.new_folder import new_run_folder, remove_unused, unfinished_or_new
from flashtrain.folders.run_folder import (
    CONFIG_FILE,
    FAILED,
    FINISHED,
    LAST,
    OUT_OF_MEMORY,
    RUNNING,
    STOPPED,
    as_begun,
    find_checkpoint,
    note_failure,
    read_summary,
    write_summary,
)
from flashtrain.folders.run_lock import hold, is_first_of_job, let_go, slurm_job
from flashtrain.interruption import Interrupted
from flashtrain.mode import mode_of, modes, work_of, working_mode
from flashtrain.run.fitting import Stopped
from flashtrain.run.train import planned_row, train
from flashtrain.settings.settings import Settings
from flashtrain.spec import task_of
from flashtrain.training.hardware import Hardware, detect_hardware, planned_hardware
from flashtrain.training.killed_ranks import name_killed_ranks
from flashtrain.training.out_of_memory import OutOfMemory

LOG_FILE = "flashtrain.log"


def settle(settings: Settings, overrides: Sequence[str], *, quiet: bool = False) -> tuple[Settings, Hardware]:
    """Adapt composed settings to this machine: the recipe's demo if there is no GPU, precision, attention.

    Args:
        settings: the composed settings.
        overrides: the command line's words; a setting that they name is not replaced by the demo's.
        quiet: print no lines about what was decided.

    Returns:
        The settings to run, and the machine's hardware.

    Raises:
        UserError: the settings cannot be run on this machine.
    """
    say = (lambda *_, **__: None) if quiet else announce.say
    if settings.hardware.plan_for is None:
        hardware = detect_hardware(settings.hardware.accelerator)
    else:
        hardware = planned_hardware(settings.hardware.plan_for, settings.trainer.devices)
    given = set(overrides_by_name(overrides))
    if not settings.is_demo and _wants_demo(settings, hardware, given):
        why = "no NVIDIA GPU found here" if hardware.kind == "cpu" else "hardware.demo=always"
        full, settings = settings, apply_demo(settings, overrides)
        level = logging.INFO if full.hardware.demo == "always" else logging.WARNING
        say(f"{why}: {_demo_line(full, settings)}", level=level)
    elif hardware.kind == "cpu" and settings.mode == "train" and settings.demo and settings.hardware.demo == "auto":
        requested = " and ".join(f"{name}=" for name in sorted(_OF_A_MODEL & given))
        if requested and not settings.is_demo:
            say(f"{requested} names a model, so the full recipe runs on this CPU. For the demo: hardware.demo=always")
    if settings.mode in ("train", "plan"):
        if settings.weights is not None and not Path(settings.weights).expanduser().exists():
            raise UserError(f"weights={settings.weights}: no such folder or file.")
        settings = deepcopy(settings)
        for line in task_of(settings).fit_weights(settings, given):
            say(line)
    if settings.mode == "train":
        settings.logger.check_installed()
    wanted, studies = settings.trainer.devices, [name for name, mode in modes().items() if mode.study]
    if hardware.kind == "cuda" and wanted > hardware.count and settings.mode in ("train", "plan", *studies):
        raise UserError(f"trainer.devices={wanted}, but this machine has {hardware.count} GPUs. Use at most that many.")
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
    if settings.attention.name != "flash":
        hardware = replace(hardware, attention=settings.attention.name)
    elif hardware.attention != "flash" and hardware.kind == "cuda":  # on a CPU the kernels say so
        say(f"attention=flash needs an NVIDIA GPU of sm_80 or later and Triton; {_name(hardware)} uses torch's SDPA.")
    if hardware.kind == "cuda" and hardware.precision == "16-mixed" and settings.hardware.precision is None:
        say(f"{_name(hardware)} has no bfloat16 tensor cores: training in float16 with loss scaling.")
    if settings.mode in ("train", "plan"):
        task_of(settings).check_step(settings, given)
    return settings, hardware


# Whoever gives one of these has a model in mind that the demo's would stand in the way of.
_OF_A_MODEL = {"model", "model.name", "model.size", "model.path", "model.config", "bert.size", "weights"}


def _for_context(hardware: Hardware) -> Hardware:
    """The machine, with the attention that devices can share: ours, on a CPU too. UserError: a GPU without it."""
    if hardware.kind == "cuda" and hardware.attention != "flash":
        raise UserError(
            "trainer.strategy=context_parallel needs attention=flash, so GPUs of sm_80 or later and Triton, and this "
            f"is {_name(hardware)}. Use trainer.strategy=ddp or fsdp."
        )
    return replace(hardware, attention="flash")


def _check_processes(settings: Settings) -> None:
    """torchrun has started its processes already; trainer.devices and trainer.nodes must say the same numbers."""
    devices, nodes, line = settings.trainer.devices, settings.trainer.nodes, None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        started = int(os.environ["WORLD_SIZE"]) // here
        if (here, started) != (devices, nodes):
            line = (
                f"torchrun started {here} processes on each of {started} machine(s), but trainer.devices={devices} "
                f"trainer.nodes={nodes}. Set trainer.devices={here} trainer.nodes={started}."
            )
    elif nodes > 1 and slurm_job() is None and "MASTER_ADDR" not in os.environ:
        line = (
            f"trainer.nodes={nodes} needs a launcher on every machine: torchrun --nnodes={nodes} "
            f"--nproc-per-node={devices} ... -m flashtrain ..., or srun with a task for each GPU."
        )
    if line is not None and settings.mode == "train":
        raise UserError(line)


def _wants_demo(settings: Settings, hardware: Hardware, given: Collection[str]) -> bool:
    if not settings.demo or settings.hardware.demo == "never":
        return False
    if settings.hardware.demo == "always":
        return True
    mode = working_mode(settings)
    measures = mode is not None and mode.measures
    return hardware.kind == "cpu" and (measures or not _OF_A_MODEL & set(given))


def _demo_line(full: Settings, demo: Settings) -> str:
    """What the demo does in the recipe's place, and how to have the recipe in full."""
    where = "run the same command on a machine with an NVIDIA GPU, or add hardware.demo=never."
    mode = working_mode(demo)
    if mode is not None and mode.measures:
        return mode.demo_line(demo, where)
    return f"{'planning' if demo.mode == 'plan' else 'training'} {task_of(demo).demo_line(full, demo, where)}"


def _name(hardware: Hardware) -> str:
    if hardware.capability is None:
        return "this CPU"
    return f"{hardware.name} (sm_{hardware.capability[0]}{hardware.capability[1]})"


def plan(settings: Settings, overrides: Sequence[str]) -> str:
    """Return the text of mode=plan: what the command would do on this machine. Nothing is started. Raises UserError."""
    quieten()
    settings, hardware = settle(settings, overrides)
    planned = working_mode(settings)
    # A study whose command names one context plans the training of that one.
    if planned is None or (planned.study and "context" in overrides_by_name(overrides)):
        return task_of(settings).plan(settings, hardware)
    return planned.plan(settings, hardware)


def run_folder(settings: Settings, overrides: Sequence[str]) -> Path:
    """Return the run's folder: the one that the words name (hydra.run.dir), that of the run to resume, or a new one.

    Raises UserError if the settings cannot be run here (no folder is made), there is no run to resume, or the named
    folder has a finished one.
    """
    given = overrides_by_name(overrides)
    if FOLDER in given:
        folder = Path(str(given[FOLDER].value())).absolute()
        if read_summary(folder).get("status") == FINISHED and _resumed(settings, folder) != folder:
            raise UserError(f"{FOLDER}={folder} has a finished run. Use another folder, or resume=auto to continue it.")
        return folder
    settings, _ = settle(settings, overrides, quiet=True)
    parent = (Path(settings.output) / settings.recipe).absolute()
    if settings.resume == "auto":
        return unfinished_or_new(parent, settings, given)
    return _resumed(settings, parent) or new_run_folder(parent)


def _resumed(settings: Settings, folder: Path) -> Path | None:
    """The folder of the run to resume, which resume=auto has found in `folder`; None: there is none."""
    if settings.resume is None or task_of(settings).is_carried(settings.resume):
        return None
    if settings.resume == "auto":
        return folder
    return find_checkpoint(settings.resume, prefer=LAST, setting="resume")[0].absolute()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; afterwards unlock it, and remove it if it is empty. UserError: it is in use."""
    try:
        hold(folder)
        yield
    finally:
        let_go(folder)
        remove_unused(folder)


def run(settings: Settings, folder: Path, *, overrides: list[str], started: float) -> dict[str, Any]:
    """Train, measure or preview in `folder`, and return the summary row, which summary.json also has after a failure.

    Args:
        settings: the composed settings.
        folder: the run's folder, which this process locks until the run ends.
        overrides: the command line's words.
        started: when the command began, as time.monotonic().

    Raises:
        UserError: the user can correct the cause (OutOfMemory is one), or another process uses the folder.
        RunFailed: the run failed otherwise.
        Stopped: a signal came, or trainer.max_minutes are over.
        Interrupted: a signal came outside of training steps, or a second Ctrl-C.
    """
    quieten()
    with held(folder), _logged(folder):
        return _run_held(settings, folder, overrides=overrides, started=started)


def run_job(settings: Settings, folder: Path, *, overrides: list[str], started: float) -> int:
    """Call `run`, print what went wrong, and return the command's exit status.

    Returns:
        0: finished, or trainer.max_minutes are over; 1: crashed; 2: a user's mistake; 3: out of memory; 129, 130 or
        143: stopped by a signal.
    """
    try:
        run(settings, folder, overrides=overrides, started=started)
    except Stopped as stop:
        return stop.status
    except BaseException as error:  # noqa: BLE001 - as said
        return say_failure(error)
    return 0


def _run_held(settings: Settings, folder: Path, *, overrides: list[str], started: float) -> dict[str, Any]:
    name_killed_ranks(partial(note_failure, folder))
    run = _resumed(settings, folder)
    if run is not None and (run / CONFIG_FILE).is_file():
        settings = as_begun(settings, run, overrides_by_name(overrides))
    settings, hardware = settle(settings, overrides)

    def note(status: str, error: str) -> None:
        # A run that could not be continued, for a mistake in the command, keeps the row that it had.
        # Whichever rank fails says so: the first one may wait for it, and be ended by the launcher.
        if (status != STOPPED or is_first_rank()) and read_summary(folder).get("status", RUNNING) == RUNNING:
            with contextlib.suppress(OSError):  # a full disk takes no row either
                row = {**planned_row(settings, hardware, overrides), "status": status, "error": error}
                write_report(folder, row)
                write_summary(folder, row)

    try:
        mode = mode_of(settings)
        do = partial(train, task_of(settings)) if mode is None else mode.run
        row = do(settings, hardware, folder, overrides=overrides, started=started)
    except (UserError, RunFailed) as error:
        note(OUT_OF_MEMORY if isinstance(error, OutOfMemory) else FAILED, str(error))
        raise
    except Stopped as stop:
        say(str(stop))
        note(STOPPED, str(stop))
        _leave_ranks()
        raise
    except (KeyboardInterrupt, SystemExit) as error:  # Lightning's Trainer makes the latter of the former
        ended = next((one for one in causes(error) if isinstance(one, Interrupted)), Interrupted(signal.SIGINT))
        if (folder / CONFIG_FILE).exists():  # else the run has not begun, and its folder is removed
            note(STOPPED, str(ended))
        raise ended from None
    except torch.OutOfMemoryError as error:
        line = (
            f"out of memory: {first_line(error)}. Try memory.activation_checkpointing=full, a smaller "
            "trainer.micro_batch or context."
        )
        note(OUT_OF_MEMORY, line)
        raise OutOfMemory(line) from error
    except Exception as error:
        note(FAILED, f"{type(error).__name__}: {error}")
        raise
    if is_first_rank():
        write_report(folder, row)
        write_summary(folder, row)
        if settings.mode == "train":
            task_of(settings).say(row, folder, settings)
    _leave_ranks()
    return row


def write_report(folder: Path, row: dict[str, Any] | None = None) -> None:
    """Write the folder's report.html; if that fails, print a line. `row`: the summary, if summary.json is missing."""
    from flashtrain.report.page import write_page

    try:
        write_page(folder, row)
    except Exception as problem:  # noqa: BLE001 - as said
        say(f"no report.html: {first_line(problem)}")


@contextlib.contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Copy the lines of a `with` block to flashtrain.log, with the time, and the traceback of what ends it."""
    # A rank that is not the first has a file of its own, for the traceback alone.
    rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0")
    path = folder / (LOG_FILE if is_first_of_job() else f"flashtrain-rank-{rank}.log")
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(), *([] if log.propagate else [log])] if is_first_of_job() else []
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        traced = None if isinstance(error, UserError | Stopped) else (type(error), error, error.__traceback__)
        line = str(error) or type(error).__name__
        if loggers or traced is not None:
            handler.handle(logging.LogRecord(log.name, logging.ERROR, __file__, 0, "%s", (line,), traced))
            note_log(error, path)
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def _leave_ranks() -> None:
    """End the process groups while every rank is still there: gloo's threads abort a process that exits with them."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
