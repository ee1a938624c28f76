"""Hash the contents of files, independent of where they are."""

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

SAVED_HASHES = "content-hashes"  # folder in the cache
READ_CHUNK = 2**20  # bytes
LOGGED_SIZE = 2**30  # bytes to read from which on a line is logged


def hash_of_contents(base: Path, paths: Sequence[Path]) -> str:
    """Return a hash of the names and contents of files.

    A file is read only once: its hash is saved in the cache folder with its size, times and inode.
    Later runs read it again only if one of these has changed.

    Args:
        base: a folder, to which the names are relative.
        paths: files below it; their order counts.

    Raises:
        OSError: a file cannot be read.
    """
    place = hashlib.sha256(str(base.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    memory = default_cache_dir() / SAVED_HASHES / f"{place}.json"
    try:
        known = read_json(memory)
    except (OSError, UserError):  # none yet, or a damaged one
        known = {}
    names = [
        path.relative_to(base).as_posix().encode("utf-8", "surrogateescape").hex() for path in paths
    ]
    seen = [_state(path) for path in paths]
    states: dict[str, Any] = {name: known.get(name, [None]) for name in names}
    new = [n for n, name in enumerate(names) if states[name][:-1] != seen[n]]
    size = sum(seen[n][0] for n in new)
    if size > LOGGED_SIZE:
        log.info("reading %.1f GB in %s once to compute its content hash", size / 1e9, base)
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for n, found in zip(new, pool.map(_hash, [paths[n] for n in new]), strict=True):
            states[names[n]] = [*seen[n], found]
    if new:
        try:
            write_atomically(memory, json.dumps(states))
        except OSError as error:
            log.debug("content hashes are not saved: %s", error)
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"\n{name} {states[name][0]} {states[name][-1]}".encode())
    return digest.hexdigest()


def _state(path: Path) -> list[int]:
    """Return size, times and inode of a file, which change whenever its content does: no program
    can set ctime."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
