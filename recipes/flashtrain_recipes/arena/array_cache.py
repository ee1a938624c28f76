"""Sequences kept on disk once they were made: a folder that appears whole or not at all."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock
import numpy as np

from flashtrain.data.sequences import Sequences, SequenceShape
from flashtrain.errors import UserError
from flashtrain.files.disk import default_cache_dir
from flashtrain.files.npy_files import DamagedArrayError, map_npy

DTYPES = {"tokens": "uint8", "offsets": "int64", "labels": "uint8"}

log = logging.getLogger(__name__)


def open_or_build(
    name: str,
    build: Callable[[], Sequences],
    cache_dir: str | os.PathLike[str] | None = None,
    shape: SequenceShape | None = None,
) -> Sequences:
    """The sequences in the cache folder `name`, memory-mapped; made by `build` where they are missing.

    name: of all that decides the content. shape: what a model is told of them, which holds for what is read too.
    Processes that ask at one time build once. UserError: a folder that cannot be written, or is damaged.
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
        found = Sequences(*(map_npy(folder / f"{field}.npy", DTYPES[field]) for field in Sequences._fields))
        _check(found, shape)
    except DamagedArrayError as error:
        raise UserError(f"{folder} is damaged ({error}): delete it, and it is made anew.") from error
    return found


def _check(found: Sequences, shape: SequenceShape | None) -> None:
    """Raise DamagedArrayError where offsets, tokens and labels do not fit one another, or the shape."""
    tokens, offsets, labels = found
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (offsets[1:] < offsets[:-1]).any():
        raise DamagedArrayError("offsets.npy does not fit tokens.npy")
    towers, rest = divmod(len(offsets) - 1, max(1, len(labels)))
    if rest or (towers < 1 and len(labels)) or (shape is not None and len(labels) and towers != shape.towers):
        raise DamagedArrayError("offsets.npy does not fit labels.npy")
    if shape is not None and labels.max(initial=0) >= shape.classes:
        raise DamagedArrayError(f"labels.npy holds {labels.max()}, of {shape.classes} classes")
    if shape is not None and tokens.max(initial=0) >= shape.vocab_size:
        raise DamagedArrayError(f"tokens.npy holds {tokens.max()}, of {shape.vocab_size} tokens")


def _write(sequences: Sequences, folder: Path) -> None:
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        unfinished.mkdir()
        for field, values in sequences._asdict().items():
            np.save(unfinished / f"{field}.npy", values.astype(DTYPES[field], copy=False), allow_pickle=False)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
