"""The folder of an export: it is there whole, or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from flashtrain.errors import UserError
from flashtrain.folders.run_folder import make_unique


@contextlib.contextmanager
def new_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new folder `parent`/`name` (`name`-2, -3, ... where that exists), which is removed again if writing into it
    fails or is interrupted.

    Raises UserError when it cannot be made, or the disk is full.
    """
    folder = make_unique(parent, name)
    try:
        yield folder
    except BaseException as problem:  # an interruption too
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(problem, OSError):
            raise UserError(f"{folder} cannot be written: {problem.strerror or problem}.") from problem
        raise
