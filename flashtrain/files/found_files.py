"""List the files of a folder, or at an address that fsspec reads: s3://, gs://,
https://, zip:// and others."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from flashtrain.errors import UserError

# Fields by which file systems identify a file's content, the most reliable first.
VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "checksum", "CRC", "crc32c", "mtime", "LastModified",
    "last_modified",
    "updated", "created",
)  # fmt: skip


@dataclass(frozen=True)
class RemoteFile:
    """A file of an fsspec file system, with the methods of Path that readers use."""

    filesystem: Any  # of fsspec
    path: str  # in the file system
    relative: str  # the path below the given address
    size: int  # in bytes; 0 if unknown
    version: str  # a text that changes with the content

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.path).suffixes

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=self.size)

    def open(self, mode: str = "rb") -> BinaryIO:
        return cast(BinaryIO, self.filesystem.open(self.path, mode))

    def __str__(self) -> str:
        return self.filesystem.unstrip_protocol(self.path)


def find_files(place: Path | str) -> dict[PurePath, Any]:
    """Find all files below a folder that are not hidden. Linked folders are followed,
    each real folder once.

    Args:
        place: a file or a folder: a Path, or an address.

    Returns:
        Paths (RemoteFiles for an address) by their paths within the folder, in the order of these.

    Raises:
        UserError: the path does not exist (with the nearest names), or it is a folder on the web.
            Errors of fsspec and of the file system's client are passed on.
    """
    if isinstance(place, str):
        return {PurePosixPath(file.relative): file for file in _remote_files(place)}
    if place.is_file():
        return {PurePath(place.name): place}
    if place.is_dir():
        return {path.relative_to(place): path for path in sorted(_files_below(place))}
    names = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = difflib.get_close_matches(place.name, names, n=3)
    hint = (
        f" Did you mean {' or '.join(str(place.with_name(name)) for name in near)}?" if near else ""
    )
    if "*" in str(place):
        hint = " Patterns are given as data.path=FOLDER data.files='*.py'."
    raise UserError(f"{place} does not exist (relative to {Path.cwd()}).{hint}")


def _files_below(folder: Path) -> list[Path]:
    found, seen = [], set()
    for current, subfolders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(current)
        subfolders[:] = [
            name for name in subfolders if real not in seen and not name.startswith(".")
        ]
        if real not in seen:
            paths = [Path(current, name) for name in names if not name.startswith(".")]
            found += [path for path in paths if path.is_file()]
        seen.add(real)
    return found


def _remote_files(address: str) -> list[RemoteFile]:
    import fsspec  # a dependency of torch; here, since local text does not need it

    filesystem, root = fsspec.core.url_to_fs(address)
    if filesystem.isfile(root):
        return [_file(filesystem, root, PurePosixPath(root).name, filesystem.info(root))]
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"no file at {address}: "
            "expected the address of one file, since folders on the web cannot be listed."
        )
    base = PurePosixPath(root)
    found = []
    for path, info in sorted(filesystem.find(root, detail=True).items()):
        inside = PurePosixPath(path)
        relative = inside.relative_to(base) if inside.is_relative_to(base) else inside
        if not any(part.startswith(".") for part in relative.parts):
            found.append(_file(filesystem, path, relative.as_posix(), info))
    return found


def _file(filesystem: Any, path: str, relative: str, info: dict[str, Any]) -> RemoteFile:
    version = next((f"{name} {info[name]}" for name in VERSIONS if info.get(name)), f"at {path}")
    return RemoteFile(filesystem, path, relative, int(info.get("size") or 0), version)
