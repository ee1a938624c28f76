"""What files hold, as a hash: the same wherever they lie and however their path is spelled.

A file is read once for it. Its hash is remembered with its size, times and inode, below the cache folder, so that every
later start of a run only looks at those.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json

log = logging.getLogger(__name__)

REMEMBERED = "content-hashes"  # the folder in the cache
AT_ONCE = 2**20  # bytes
WORTH_A_LINE = 2**30  # bytes that are read at once


def hash_of_contents(base: Path, paths: Sequence[Path]) -> str:
    """A hash of names, relative to `base`, and contents of these files below it, in their order.

    Raises OSError for a file that cannot be read.
    """
    place = hashlib.sha256(str(base.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    memory = default_cache_dir() / REMEMBERED / f"{place}.json"
    try:
        known = read_json(memory)
    except (OSError, UserError):  # none yet, or a damaged one
        known = {}
    names = [path.relative_to(base).as_posix().encode("utf-8", "surrogateescape").hex() for path in paths]
    seen = [_state(path) for path in paths]
    states: dict[str, Any] = {name: known.get(name, [None]) for name in names}
    new = [n for n, name in enumerate(names) if states[name][:-1] != seen[n]]
    size = sum(seen[n][0] for n in new)
    if size > WORTH_A_LINE:
        log.info("reading %.1f GB in %s once to compute its content hash", size / 1e9, base)
    with ThreadPoolExecutor() as pool:  # hashing lets other threads go on
        for n, found in zip(new, pool.map(_hash, [paths[n] for n in new]), strict=True):
            states[names[n]] = [*seen[n], found]
    if new:
        try:
            write_atomically(memory, json.dumps(states))
        except OSError as error:
            log.debug("content hashes are not remembered: %s", error)
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"\n{name} {states[name][0]} {states[name][-1]}".encode())
    return digest.hexdigest()


def _state(path: Path) -> list[int]:
    """What changes whenever the file does: nobody can set the second time."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()
