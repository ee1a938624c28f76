"""The command as Python functions, for programs and notebooks: the same code, the same run folders.

    import flashtrain

    run = flashtrain.train(recipe="gpt2", context=4096, data={"source":
    "files", "path": "novel.txt"})
    flashtrain.evaluate(run)                        # {"validation_loss": ..., "perplexity": ...}
    flashtrain.generate(run, "Once upon a time")
    flashtrain.load(run).model                      # with .tokenizer and .settings

Settings have the command's names (docs/reference/settings.md). A group's are a dictionary,
trainer={"steps": 10}, or dotted, **{"trainer.steps": 10}. The group's own name in its dictionary
chooses it as the command's optimizer=lamb does: optimizer={"name": "lamb"} or optimizer="lamb".
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, overload

from torch import nn

from flashtrain.command import modes
from flashtrain.command.compose import CHOOSES
from flashtrain.command.overrides import plain_words
from flashtrain.command.process_state import preserve_process_state
from flashtrain.command.request import settings_of
from flashtrain.errors import RunFailed, UserError, one_of
from flashtrain.files.shipped import conf_folder
from flashtrain.folders.new_folder import remove_unused
from flashtrain.folders.run_folder import (
    BEST,
    CONFIG_FILE,
    STOPPED,
    find_checkpoint,
    read_settings,
    read_summary,
)
from flashtrain.folders.run_lock import let_go, slurm_job
from flashtrain.interruption import Stopped
from flashtrain.mode import is_of_checkpoint, mode_of
from flashtrain.models.generation import generate as generate_tokens
from flashtrain.models.trainable import as_trainable
from flashtrain.run.job import Job
from flashtrain.run.job_process import JobProcesses
from flashtrain.settings.command_line import FOLDER, CommandLine, as_value, quoted
from flashtrain.settings.settings import TASK_MODES, Settings
from flashtrain.spec import TrainedModel, task_of
from flashtrain.training.metrics_file import METRICS, read_metrics
from flashtrain.training.out_of_memory import OutOfMemory

# Settings of the group `generate`.
_OF_WRITING = ("max_new_tokens", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Run:
    """A run that has ended. It can be passed wherever the path of its folder can, as to
    flashtrain.evaluate or Path.

    Attributes:
        folder: the run's folder.
        summary: the row of summary.json; its "status" is "finished", or "stopped" if
            trainer.max_minutes ended the run.
    """

    folder: Path
    summary: dict[str, Any] = field(repr=False)

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def checkpoint(self) -> Path:
        """The path of the run's best checkpoint, else of its last one. Raises
        UserError if the run left none."""
        return find_checkpoint(str(self.folder), prefer=BEST)[1]

    @property
    def settings(self) -> Settings:
        """The settings that the run used, read from its config.yaml."""
        return read_settings(self.folder)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl, one for each logged step: metric names and their values."""
        return read_metrics(self.folder / METRICS)


Trained = Run | TrainedModel | str | os.PathLike[str]
Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]


def train(recipe: str, *, quiet: bool = True, **settings: Any) -> Run:
    """Train a model as the command with this recipe does; if the recipe is a benchmark, measure.

    With several trainer.devices the run is a process of its own. At SIGTERM or Ctrl-C the current
    step finishes and a checkpoint is saved; then the program's own handler of the signal is called.
    Python's, NumPy's and torch's random generators are seeded.

    Args:
        recipe: the recipe's name, such as "gpt2".
        quiet: print warnings only and draw no progress; the folder's flashtrain.log has every line.
        settings: as on the command line; logger is "none" unless given.

    Raises:
        UserError: the caller can correct the cause: a wrong setting, or too little memory.
        RunFailed: the run failed otherwise.
        KeyboardInterrupt: Ctrl-C, once the checkpoint is saved; resume="auto" or
            resume=FOLDER continues the run.
    """
    began = time.monotonic()
    line = CommandLine(plain_words([f"recipe={recipe}", *words_of({"logger": "none", **settings})]))
    try:
        with preserve_process_state(quiet=quiet):
            requested = settings_of(line)
            _refuse_other_work(requested)
            job = Job.of(requested, line)
            if (
                requested.trainer.ranks > 1
                and "TORCHELASTIC_RUN_ID" not in os.environ
                and slurm_job() is None
            ):
                _in_a_process(line, job.folder, quiet=quiet)
            else:
                job.run(started=began)
    except Stopped as stop:
        if stop.status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(stop)) from None
        if stop.status:  # the checkpoint is written: the program ends, or does as it has decided
            signal.raise_signal(signal.Signals(stop.status - 128))
    return Run(job.folder, read_summary(job.folder))


def evaluate(run: Trained, *, quiet: bool = True, **settings: Any) -> dict[str, Any]:
    """Evaluate a run's best checkpoint, or the checkpoint given, on held-out data; return
    {"validation_loss": ...}.

    Args:
        run: a Run, a run folder, a checkpoint in one, a transformers model's folder, or a
            classifier's .safetensors.
        quiet: print warnings only and draw no progress.
        settings: settings that differ from the run's (from recipe="hf"'s for a transformers model),
            such as data={"path": OTHER}. mode="ruler" runs that mode instead.

    Raises:
        UserError: there is no such checkpoint, or a setting does not apply to it.
    """
    with preserve_process_state(quiet=quiet):
        return modes.of_checkpoint(_of(run, settings))


@overload
def generate(run: nn.Module, prompt: Any, max_new_tokens: int, **options: Any) -> Any: ...
@overload
def generate(
    run: Trained, prompt: Prompt = "", max_new_tokens: int | None = None, **options: Any
) -> str: ...
def generate(run: Any, prompt: Any = "", max_new_tokens: int | None = None, **options: Any) -> Any:
    """Return what a language model writes after a prompt: a text for a run,
    tokens for a torch module.

    Args:
        run: as in `evaluate`; a TrainedModel of flashtrain.load, which is used as it is
            now; or a torch module.
        prompt: a text. If the run was trained on conversations: a list of messages, {"messages":
            [...], "tools": [...]}, or the user's first message as a text. For a torch module:
            tokens (B, S) int64, or a list of lists of ids, of any lengths.
        max_new_tokens: how many tokens to write; by default the run's generate.max_new_tokens.
        options: temperature, top_k, top_p and seed (see flashtrain.models.generation.generate), by
            default the run's. If `run` is a path, also other settings, such as context.

    Returns:
        The prompt and its continuation; for a conversation the answer alone; for a torch
        module tokens (B, S + new), or a list of lists of ids.

    Raises:
        UserError: the model cannot generate text, or an option does not exist.
    """
    if isinstance(run, nn.Module):
        return generate_tokens(as_trainable(run), prompt, max_new_tokens, **options)  # type: ignore[arg-type]
    prompt = prompt if isinstance(prompt, str) else json.dumps(prompt)
    given = {**options, **({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens})}
    with preserve_process_state(quiet=True):
        if isinstance(run, TrainedModel):
            return _continued(run, prompt, given)
        named = {
            f"generate.{name}" if name in _OF_WRITING else name: value
            for name, value in given.items()
        }
        requested = _of(run, named, mode="generate")
        requested.prompt = prompt
        return modes.of_checkpoint(requested).get("text", "")  # of a typed conversation nothing


def export(run: Trained, *, quiet: bool = True, **settings: Any) -> Path:
    """Export a run's best checkpoint, or the one given, for other programs (transformers,
    if it knows the model).

    Return the new folder, inside the run's folder. Raises UserError if there is no such checkpoint.
    """
    with preserve_process_state(quiet=quiet):
        return modes.of_checkpoint(_of(run, settings, mode="export"))["folder"]


def load(run: Trained, **settings: Any) -> TrainedModel:
    """Load the model of a run's best checkpoint, or of the checkpoint given, with its tokenizer
    and the run's settings.

    Args:
        run: as in `evaluate`.
        settings: settings that differ from the run's, such as attention="sdpa", a longer
            context, or hardware="cpu".

    Returns:
        The model in evaluation mode, on the machine's device.

    Raises:
        UserError: there is no such checkpoint, or a setting does not apply to it.
    """
    with preserve_process_state(quiet=True):
        requested, hardware = modes.on_this_machine(_of(run, settings))
        return task_of(requested).load(requested, hardware)


def plan(recipe: str, **settings: Any) -> str:
    """Return a text on what `train` would do: parameters, memory and time. Nothing is started.
    Raises UserError for a wrong setting."""
    line = CommandLine(
        plain_words([f"recipe={recipe}", "mode=plan", *words_of({"logger": "none", **settings})])
    )
    with preserve_process_state(quiet=True):
        return modes.plan(settings_of(line), line)


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the command-line words (key=value) of settings given in Python. Raises UserError for a
    value of a type that no setting has."""
    words: list[str] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and not key.endswith(("options", "mixture")):
            inner, own = dict(value), CHOOSES.get(key, "name")
            if own in inner and (conf_folder() / key).is_dir():
                words.append(f"{key}={_value(f'{key}.{own}', inner.pop(own))}")
            words += words_of({f"{key}.{name}": one for name, one in inner.items()})
        elif isinstance(value, Mapping):
            # Of a component or of sources, whose names are not known beforehand.
            words += [
                f"++{key}.{name}={_value(f'{key}.{name}', one)}" for name, one in value.items()
            ]
        else:
            plus = "++" if ".options." in key else ""
            words.append(f"{plus}{key}={_value(key, value)}")
    return words


def _value(key: str, value: Any) -> str:
    """Return the value of setting `key` as text in Hydra's grammar of overrides."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Real):
        return repr(int(value) if isinstance(value, Integral) else float(value))
    if isinstance(value, str | os.PathLike):
        return as_value(os.fspath(value))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return f"[{','.join(_value(key, one) for one in value)}]"
    if isinstance(value, Mapping) and all(
        isinstance(name, str) and name.isidentifier() for name in value
    ):
        return f"{{{','.join(f'{name}:{_value(key, one)}' for name, one in value.items())}}}"
    raise UserError(
        f"{key} is a {type(value).__name__}. "
        "Expected None, bool, int, float, str, a path, a list, or a dictionary by name."
    )


def _of(run: Trained, settings: Mapping[str, Any], mode: str = "evaluate") -> Settings:
    """Return the checked settings of `mode` on a trained run, with `settings` on top of the run's
    own."""
    given = os.fspath(run)
    where = "weights" if given.endswith(".safetensors") else "checkpoint"
    if Path(given, "config.json").is_file() and not Path(given, CONFIG_FILE).is_file():
        where = "model.path"
    words = [f"mode={settings.get('mode', mode)}", f"{where}={_value(where, given)}"]
    return settings_of(
        plain_words([*words, *words_of({k: v for k, v in settings.items() if k != "mode"})])
    )


def _refuse_other_work(settings: Settings) -> None:
    """Raise UserError for a mode that `train` does not run: another function does, or only the
    command."""
    mode = mode_of(settings)
    if settings.mode == "plan" or is_of_checkpoint(settings.mode):
        function = settings.mode if settings.mode in TASK_MODES else "evaluate"
        raise UserError(f"mode={settings.mode} does not train. Call flashtrain.{function}.")
    if mode is not None and mode.study:
        raise UserError(
            f"mode={settings.mode} runs several trainings, each as a command of its own, which "
            "flashtrain.train cannot do. Run python -m flashtrain "
            f"recipe={settings.recipe} in a shell, or train one context with mode='train'."
        )


def _continued(loaded: TrainedModel, prompt: str, options: Mapping[str, Any]) -> str:
    """Return the prompt and what the loaded model, with its current weights, writes after it."""
    from flashtrain.tasks.language.generate import continue_text

    for name in options:
        one_of("option of generate for a loaded model", name, (*_OF_WRITING, "seed"))
    able = getattr(loaded.model, "can_generate", False) and hasattr(loaded.settings, "generate")
    if loaded.tokenizer is None or not able:
        raise UserError(
            f"{type(loaded.model).__name__} cannot generate text: only language models can."
        )
    seed = options.get("seed", loaded.settings.seed)
    own = {name: value for name, value in options.items() if name != "seed"}
    how = replace(loaded.settings.generate, **own)
    how.check()
    settings = loaded.settings.having(generate=how, prompt=prompt, seed=seed)
    return continue_text(loaded.model, loaded.tokenizer, settings)


def _in_a_process(line: CommandLine, folder: Path, *, quiet: bool) -> None:
    """Run the command line in a process of its own, whose other ranks Lightning starts. Raises as
    `Job.run`."""
    output = subprocess.DEVNULL if quiet else None
    words = [*line, f"{FOLDER}={quoted(str(folder))}"]
    let_go(folder)  # it is the other process's to hold
    with JobProcesses() as processes:
        status = processes.run(words, command=[sys.executable, "-m", "flashtrain"], output=output)
    row = read_summary(folder)
    remove_unused(folder)
    reported = str(row.get("error") or f"the run in {folder} ended with exit status {status}")
    stopped = processes.stopped_by
    if stopped is not None or row.get("status") == STOPPED:
        raise Stopped(reported, 0 if stopped is None else 128 + stopped)
    if status:
        raise {2: UserError, 3: OutOfMemory}.get(status, RunFailed)(reported)
