"""Sequences kept on disk once they were made: a folder that appears whole or not at all."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock
import numpy as np

from flashtrain.data.cache_folder import default_cache_dir
from flashtrain.data.sequences.samples import Sequences
from flashtrain.errors import UserError

log = logging.getLogger(__name__)


def open_or_build(
    name: str, build: Callable[[], Sequences], cache_dir: str | os.PathLike[str] | None = None
) -> Sequences:
    """The sequences in the cache folder `name`, memory-mapped; made by `build` where they are missing.

    name: of all that decides the content. Processes that ask at one time build once. UserError: a folder that cannot
    be written, or is damaged.
    """
    base = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = base / name
    if not folder.is_dir():
        try:
            base.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{folder}.lock"):
                if not folder.is_dir():
                    _write(build(), folder)
        except OSError as error:
            raise UserError(
                f"cannot write to the cache folder {base}: {error.strerror or error}. "
                "Choose another with sequence.cache_dir, or set FLASHTRAIN_CACHE."
            ) from error
    try:
        return Sequences(*(np.load(folder / f"{field}.npy", mmap_mode="r") for field in Sequences._fields))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{folder} is damaged ({str(error).splitlines()[0]}): delete it, and it is made anew."
        ) from error


def _write(sequences: Sequences, folder: Path) -> None:
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        unfinished.mkdir()
        for field, values in sequences._asdict().items():
            np.save(unfinished / f"{field}.npy", values)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
