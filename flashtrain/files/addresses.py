"""Where text lies, and by what its content is known: addresses, the hub, files on this machine.

Files that fsspec reads: s3://, gs://, https://, zip://, memory:// and what else is installed. Each stands for a
pathlib.Path where text is read: open, stat, name, suffix and suffixes are what its readers use.

The Hugging Face hub: whether it answers from here, asked once, before its libraries ask again and again.

What files hold, as a hash: the same wherever they lie and however their path is spelled. A file is read once for it.
Its hash is remembered with its size, times and inode, below the cache folder, so that every later start of a run only
looks at those.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, cast
from urllib.parse import urlparse
from urllib.request import getproxies

from flashtrain.errors import UserError
from flashtrain.files.caches import default_cache_dir
from flashtrain.files.disk import write_atomically
from flashtrain.files.foreign_files import CHUNK, read_json_object

# What file systems tell of a file's content, the surest first.
VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "checksum", "CRC", "crc32c", "mtime", "LastModified", "last_modified",
    "updated", "created",
)  # fmt: skip


@dataclass(frozen=True)
class RemoteFile:
    """path: within the file system. relative: within the address that was given. size: bytes, 0 where nobody says.
    version: what changes with the content."""

    filesystem: Any
    path: str
    relative: str
    size: int
    version: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.path).suffixes

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=self.size)

    def open(self, mode: str = "rb") -> BinaryIO:
        # Buffered here: not every file system's own files read lines of bounded length.
        return cast(BinaryIO, io.BufferedReader(self.filesystem.open(self.path, mode), CHUNK))

    def __str__(self) -> str:
        return self.filesystem.unstrip_protocol(self.path)


def remote_files(address: str) -> list[RemoteFile]:
    """The file at the address, or every one below it that is not hidden, in the order of their paths.

    Raises UserError: an unknown kind of address, a package that it needs, a place that cannot be read.
    """
    import fsspec  # torch and Lightning bring it; text on this machine needs none of it

    try:
        filesystem, root = fsspec.core.url_to_fs(address)
        if filesystem.isfile(root):
            return [_file(filesystem, root, PurePosixPath(root).name, filesystem.info(root))]
        if address.startswith(("http://", "https://")):
            raise UserError(f"no file at {address}: of a web address one file is read.")
        below = filesystem.find(root, detail=True)
    except UserError:
        raise
    except ImportError as error:  # fsspec's own words: which package
        raise UserError(f"data.path={address} needs a package that is not installed: {_line(error)}.") from error
    except Exception as error:  # whatever the file system's client has
        raise UserError(f"cannot read {address}: {_line(error)}.") from error
    base = PurePosixPath(root)
    found = []
    for path, info in sorted(below.items()):
        inside = PurePosixPath(path)
        relative = inside.relative_to(base) if inside.is_relative_to(base) else inside
        if not any(part.startswith(".") for part in relative.parts):
            found.append(_file(filesystem, path, relative.as_posix(), info))
    return found


def _file(filesystem: Any, path: str, relative: str, info: dict[str, Any]) -> RemoteFile:
    version = next((f"{name} {info[name]}" for name in VERSIONS if info.get(name)), f"at {path}")
    return RemoteFile(filesystem, path, relative, int(info.get("size") or 0), version)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


SECONDS = 3.0  # in which a name is found and a connection made; the libraries wait and try again for half a minute
OFFLINE = "HF_HUB_OFFLINE"  # huggingface_hub's own switch, which datasets and transformers follow


@cache
def work_offline_where_unreachable() -> None:
    """Where the hub cannot be reached, have its libraries look at what they have kept, and answer at once.

    A proxy finds names that this machine does not: behind one, and where HF_HUB_OFFLINE is set, nothing is changed.
    """
    if OFFLINE in os.environ or getproxies().keys() & {"https", "all"}:
        return
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    if _answers(address.hostname or "huggingface.co", port):
        return
    os.environ[OFFLINE] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # read before, as they were imported
        if name in sys.modules:
            setattr(sys.modules[name], OFFLINE, True)


def _answers(host: str, port: int) -> bool:
    """Whether a connection comes about in time. In a thread: looking up a name has no limit of its own."""
    made = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=SECONDS).close()
            made.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True, name="hub")
    thread.start()
    thread.join(SECONDS)
    return made.is_set()


log = logging.getLogger(__name__)

REMEMBERED = "content-hashes"  # the folder in the cache
WORTH_A_LINE = 2**30  # bytes that are read at once


def hash_of_contents(base: Path, paths: Sequence[Path]) -> str:
    """A hash of names, relative to `base`, and contents of these files below it, in their order.

    Raises OSError for a file that cannot be read.
    """
    place = hashlib.sha256(str(base.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    memory = default_cache_dir() / REMEMBERED / f"{place}.json"
    try:
        known = read_json_object(memory)
    except UserError:  # none yet, or a damaged one
        known = {}
    names = [path.relative_to(base).as_posix().encode("utf-8", "surrogateescape").hex() for path in paths]
    seen = [_state(path) for path in paths]
    states: dict[str, Any] = {name: known.get(name) for name in names}
    new = [n for n, name in enumerate(names) if not _is_known(states[name], seen[n])]
    size = sum(seen[n][0] for n in new)
    if size > WORTH_A_LINE:
        log.info("reading %.1f GB in %s once, to know it again", size / 1e9, base)
    with ThreadPoolExecutor() as pool:  # hashing lets other threads go on
        for n, found in zip(new, pool.map(_hash, [paths[n] for n in new]), strict=True):
            states[names[n]] = [*seen[n], found]
    if new:
        try:
            write_atomically(memory, json.dumps(states))
        except UserError as error:
            log.debug("content hashes are not remembered: %s", error)
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"\n{name} {states[name][0]} {states[name][-1]}".encode())
    return digest.hexdigest()


def _state(path: Path) -> list[int]:
    """What changes whenever the file does: nobody can set the second time."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _is_known(remembered: object, seen: list[int]) -> bool:
    return isinstance(remembered, list) and remembered[:-1] == seen and isinstance(remembered[-1], str)


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
