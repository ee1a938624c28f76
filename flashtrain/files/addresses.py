"""Files that fsspec reads: s3://, gs://, https://, zip://, memory:// and what else is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from flashtrain.errors import UserError

# What file systems say of a file's content, the surest first.
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
        return cast(BinaryIO, self.filesystem.open(self.path, mode))

    def __str__(self) -> str:
        return self.filesystem.unstrip_protocol(self.path)


def remote_files(address: str) -> list[RemoteFile]:
    """The file at the address, or every one below it that is not hidden, in the order of their paths.

    Raises UserError for a folder on the web, and what fsspec and the file system's client raise.
    """
    import fsspec  # torch and Lightning bring it; text on this machine needs none of it

    filesystem, root = fsspec.core.url_to_fs(address)
    if filesystem.isfile(root):
        return [_file(filesystem, root, PurePosixPath(root).name, filesystem.info(root))]
    if address.startswith(("http://", "https://")):
        raise UserError(f"no file at {address}: of a web address one file is read.")
    below = filesystem.find(root, detail=True)
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
