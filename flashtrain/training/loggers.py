"""Loggers by name, and metrics.csv: every run's own, whole after a kill and gone on with after resuming."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import netrc
import os
import re
import secrets
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from flashtrain.announce import say
from flashtrain.errors import UserError, unknown
from flashtrain.files.disk import csv_value, write_atomically
from flashtrain.files.foreign_files import MIB, read_text

STEP, EPOCH = "step", "epoch"
MOST_BYTES = 512 * MIB  # a million rows of a run are some 200
_LARGEST_STEP = 18  # digits


class MetricsFile(Logger):
    """A Lightning logger that writes every metric to one CSV file: a column a metric, a row a step.

    What is logged for one step in one go shares a row. The file is appended to; a new metric adds its column. A run
    that continues from an earlier step drops the rows from that step on, since it logs them again. Steps are counted
    as Lightning's loggers have them, from 0. `flush` puts a row on the disk that may still gain values.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._columns: list[str] = []
        self._row: dict[str, Any] = {}
        self._row_at: int | None = None  # where the row stands in the file, once flushed
        self._begun = False

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else int(step)
        self._begin(step)
        # The same again is no other row: the learning rate comes with every micro-batch of a step.
        repeated = any(
            name in self._row and str(self._row[name]) != str(metrics[name]) for name in metrics if name != EPOCH
        )
        if self._row and (int(self._row[STEP]) != step or repeated):
            self._close_row()
        # The epoch is that of the row's step: the validation after the last one comes when the epoch is over.
        epoch = {EPOCH: self._row[EPOCH]} if EPOCH in self._row else {}
        self._row = {**self._row, STEP: step, **metrics, **epoch}

    @rank_zero_only
    def save(self) -> None:
        """Nothing yet: Lightning calls this after every metric, and a row is written when its step is over."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last row, which a validation that follows the fit may still add to."""
        self.flush()

    @rank_zero_only
    def continue_from(self, done: int) -> None:
        """A run goes on after so many optimiser steps: the rows of those stay, and the last of them may gain values."""
        if self._begun:
            return
        self._begin(done)
        if not self.path.is_file() or not done:
            return
        _, rows = read_metrics(self.path)
        if rows and int(rows[-1][STEP]) == done - 1:
            self._row = {name: value for name, value in rows[-1].items() if value != ""}
            self._row_at = self._rewrite(rows)

    @rank_zero_only
    def flush(self) -> None:
        """Have the row of the step in progress in the file: what a checkpoint of this step does not log again."""
        if not self._row:
            return
        new = [name for name in self._row if name not in self._columns]
        if new:
            # In one go with the row: a run killed in between would have lost a row that its checkpoint has behind it.
            rows = read_metrics(self.path)[1] if self.path.is_file() else []
            earlier = rows if self._row_at is None else rows[:-1]
            self._columns = list(dict.fromkeys([*(self._columns or [STEP]), *new]))
            self._row_at = self._rewrite([*earlier, self._row])
            return
        text = io.StringIO(newline="")
        values = {name: csv_value(value) for name, value in self._row.items()}
        csv.DictWriter(text, self._columns, restval="").writerow(values)
        try:
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                self._row_at = file.seek(0, 2) if self._row_at is None else file.seek(self._row_at)
                file.write(text.getvalue().encode())
                file.truncate()
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem

    def _begin(self, step: int) -> None:
        """Before the first row: keep what an earlier run wrote before this step."""
        if self._begun:
            return
        self._begun = True
        if self.path.is_file():
            try:
                columns, rows = read_metrics(self.path)
            except UserError as error:
                self._set_aside(error)
                return
            self._columns = columns
            self._rewrite([row for row in rows if (at := _step_of(row)) is not None and at < step])

    def _set_aside(self, error: UserError) -> None:
        """Keep a file that is no metrics.csv under another name: the run goes on with a new one."""
        kept = self.path.with_name(f"{self.path.name}.unreadable")
        try:
            self.path.replace(kept)
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem
        say(f"{error} It is kept as {kept}, and a new one begins.")

    def _close_row(self) -> None:
        self.flush()
        self._row, self._row_at = {}, None

    def _rewrite(self, rows: list[dict[str, Any]]) -> int:
        """Have these rows alone in the file; returns where the last of them begins, in bytes."""
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
                writer.writerow({name: csv_value(name) for name in self._columns})
                table = [{name: csv_value(value) for name, value in row.items()} for row in rows]
                writer.writerows(table[:-1])
                last = file.tell()
                writer.writerows(table[-1:])
            partial.replace(self.path)
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem
        return last


def read_metrics(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """(columns, rows) of a metrics.csv, all values as text, "" where a row has none.

    Raises UserError for a file that is none: no text, a field of more than 131,072 characters, no column of steps.
    """
    reader = csv.DictReader(io.StringIO(read_text(path, MOST_BYTES), newline=""), restval="")
    try:
        rows = [{name: value or "" for name, value in row.items() if name is not None} for row in reader]
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num + 1}, is no line of a metrics.csv: {error}.") from error
    columns = list(reader.fieldnames or [])
    if columns and (STEP not in columns or len(set(columns)) < len(columns)):
        raise UserError(f"{path} is no metrics.csv: its first line must name each metric once, and {STEP}.")
    return columns, rows


def _step_of(row: dict[str, str]) -> int | None:
    """The step of a row; None where it is no number."""
    text = row.get(STEP, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LARGEST_STEP else None


def _unwritable(path: Path, problem: OSError) -> UserError:
    return UserError(f"could not write {path}: {problem.strerror or problem}")


KINDS = ("none", "csv", "tensorboard", "wandb")
MODES = ("auto", "online", "offline")
METRICS = "metrics.csv"
RUN_ID = "wandb_id.txt"


def make_loggers(
    kind: str | Sequence[str],
    run_dir: str | Path,
    *,
    project: str = "flashtrain",
    name: str | None = None,
    group: str | None = None,
    run_id: str | None = None,
    config: dict[str, Any] | None = None,
    mode: str = "auto",
) -> list[Logger]:
    """The loggers of a training run. Every run writes run_dir/metrics.csv; kind="wandb" adds Weights & Biases, and
    "tensorboard" the events that it reads, in run_dir/tensorboard.

    kind: one or several; "csv" and "none" write the files only. run_id: the W&B run to continue; None takes the one
    that an earlier run in run_dir left in wandb_id.txt, or begins a new one. group: what W&B lists together.
    config: logged as the run's configuration. mode: "auto" is online where a W&B key is configured, else offline with
    one line that says how to send the run later; the environment's WANDB_MODE decides over "auto". Driven by a
    `wandb sweep` agent, the run keeps the id that the agent gave it.
    Raises UserError for an unknown kind or mode, or where wandb is wanted but not installed.
    """
    kinds = [kind] if isinstance(kind, str) else list(kind)
    for name_of_one in kinds:
        if name_of_one not in KINDS:
            raise unknown("logger", name_of_one, KINDS)
    run_dir = Path(run_dir)
    loggers: list[Logger] = [MetricsFile(run_dir / METRICS)]
    if "tensorboard" in kinds:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "logger=tensorboard needs the package tensorboard, which is not installed: pip install tensorboard"
            )
        loggers.append(TensorBoardLogger(run_dir, name="", version="tensorboard", default_hp_metric=False))
    if "wandb" in kinds:
        loggers.append(_wandb(run_dir, project, name, group, run_id, config, mode))
    return loggers


def has_wandb_key() -> bool:
    """Whether a Weights & Biases key is configured: in the environment, or in the netrc file as `wandb login` does."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    given = os.environ.get("NETRC")
    home = Path.home()
    for path in [Path(given)] if given else [home / ".netrc", home / "_netrc"]:
        if not path.is_file():
            continue
        try:
            if netrc.netrc(str(path)).authenticators(host) is not None:
                return True
        except (netrc.NetrcParseError, OSError):
            continue
    return False


def log_figure(project: str, *, group: str | None, folder: str | Path, figure: str | Path, mode: str = "auto") -> None:
    """Log a sweep's figure (a PNG file) to Weights & Biases, as a run of its own in the sweep's group.

    folder: the sweep's, in which wandb keeps its files. mode: as for `make_loggers`. Call it when no other W&B run is
    under way. Raises UserError for an unknown mode or a missing wandb.
    """
    wandb = _import_wandb()
    _silence(wandb)
    run = wandb.init(
        project=project,
        group=group,
        name=Path(folder).name,
        dir=str(folder),
        job_type="sweep",
        mode=_wandb_mode(mode, Path(folder)),
        reinit="finish_previous",
    )
    run.log({Path(figure).stem: wandb.Image(str(figure))})
    run.finish()


def log_summary(loggers: list[Logger], row: dict[str, Any]) -> None:
    """Put a run's summary row into the loggers that keep one."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("summary", _markdown(["", "value"], list(row.items())))
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update({key: value for key, value in row.items() if value is not None})


def log_table(loggers: list[Logger], name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put rows into the loggers that keep tables: a column for each key of any row.

    A column of numbers and words, such as lengths of 128 and of a "paragraph", becomes words: theirs have one type.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    worded = {key for key in columns if any(isinstance(row.get(key), str) for row in rows)}

    def cell(row: Mapping[str, Any], key: str) -> Any:
        value = row.get(key)
        return str(value) if key in worded and value is not None else value

    data = [[cell(row, key) for key in columns] for row in rows]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, _markdown(columns, data))
        if isinstance(logger, WandbLogger):
            logger.log_table(name, columns=columns, data=data)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, [":---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join('' if cell is None else str(cell) for cell in line)} |" for line in lines)


def log_image(loggers: list[Logger], name: str, path: Path) -> None:
    """Put a PNG file into the loggers that keep images."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            import matplotlib.image

            logger.experiment.add_image(name, matplotlib.image.imread(path), dataformats="HWC")
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)])


def close_loggers(loggers: list[Logger]) -> None:
    """End the Weights & Biases run, so that the next run of this process begins its own, and TensorBoard's file."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.close()
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def _import_wandb() -> Any:
    if importlib.util.find_spec("wandb") is None:
        raise UserError("logger=wandb needs the package wandb, which is not installed: pip install wandb")
    import wandb

    return wandb


def _silence(wandb: Any) -> None:
    """W&B prints nothing from now on, where the environment says no else: its greetings, warnings of what Lightning
    passes to it, and charts at the end. What a user needs of it is said in a line of our own."""
    if "WANDB_SILENT" not in os.environ:
        wandb.setup(settings=wandb.Settings(silent=True))


def _wandb_mode(mode: str, folder: Path, run_id: str = "") -> str:
    """The mode to give to wandb.init, after saying how to sync where "auto" became offline."""
    if mode not in MODES:
        raise unknown("wandb mode", mode, MODES)
    chosen = os.environ.get("WANDB_MODE") if mode == "auto" else mode
    if chosen:
        return chosen
    if has_wandb_key():
        return "online"
    which = f"{folder / 'wandb'}/offline-run-*{run_id}"
    say(f"Weights & Biases: no key configured, logging offline; send the run later with: wandb sync {which}")
    return "offline"


def _wandb(
    run_dir: Path,
    project: str,
    name: str | None,
    group: str | None,
    run_id: str | None,
    config: dict[str, Any] | None,
    mode: str,
) -> WandbLogger:
    _silence(_import_wandb())
    options: dict[str, Any] = {}
    if group is not None:
        options["group"] = group
    if config is not None:
        options.update(config=config, allow_val_change=True)
    if os.environ.get("WANDB_SWEEP_ID"):
        run_id = None  # the agent has put its run's id into the environment, where wandb finds it
    else:
        run_id = _remembered_id(run_dir, run_id)
        options["id"] = run_id

    options["mode"] = _wandb_mode(mode, run_dir, run_id or "")
    run_dir.mkdir(parents=True, exist_ok=True)
    return _AnnouncedWandb(name=name, save_dir=run_dir, project=project, **options)


@contextlib.contextmanager
def _without_launch() -> Iterator[None]:
    """A run begins without what W&B Launch's inputs are read by, which takes a second to import and notes its absence
    in a log of W&B's own. In a program that uses Launch, or was launched, it is there already or is wanted."""
    name = "wandb.sdk.launch"
    if name in sys.modules or any(variable.startswith("WANDB_LAUNCH") for variable in os.environ):
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment] # an import that fails at once
    try:
        yield
    finally:
        sys.modules.pop(name, None)


class _AnnouncedWandb(WandbLogger):
    """Says where the run is to be seen, once it has begun online."""

    @property
    def experiment(self) -> Any:
        begins = self._experiment is None and not getattr(rank_zero_only, "rank", 0)
        with _without_launch() if begins else contextlib.nullcontext():
            run = super().experiment
        if begins and self._wandb_init.get("mode") == "online":
            say(f"Weights & Biases: {run.url}")
        return run


def _remembered_id(run_dir: Path, run_id: str | None) -> str:
    """The W&B id of the run in this folder, written down so that resuming continues the same W&B run."""
    file = run_dir / RUN_ID
    if run_id is None and file.exists():
        run_id = read_text(file, most=1000).strip() or None  # empty: written by a run that was killed meanwhile
        if run_id is not None and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id):  # the file may be anybody's
            raise UserError(f"{file} holds no id of a W&B run: remove it, and a new W&B run begins.")
    if run_id is None:
        run_id = secrets.token_hex(4)
    if not getattr(rank_zero_only, "rank", 0):
        write_atomically(file, run_id + "\n")
    return run_id
