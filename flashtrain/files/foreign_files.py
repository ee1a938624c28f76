"""Files of unknown origin: read with bounds, whether plain or compressed.

Small files that anybody may have written (settings, JSON, vocabularies): read bounded, and never believed.

Every file of a run folder, a cache, a checkpoint folder or an export may come from elsewhere. So: a size is looked at
before a byte is read; YAML has no aliases (a few lines of them become gigabytes) and no interpolation (`${oc.env:KEY}`
would print a secret); depth is bounded; and whatever is wrong is one UserError that names the file. Checkpoints are
read by training/checkpoints.py, weights by integrations/safetensors_files.py.

Opening a file that may be compressed: the suffix says how (.gz, .xz, .zst).

Content is unpacked as it is read, some MiB at a time: a small file may hold gigabytes, and its reader says how many of
them it wants. What a file may ask of the memory to be unpacked at all is bounded here.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import stat
import zlib
from abc import abstractmethod
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml
import zstandard
from omegaconf._utils import get_yaml_loader

from flashtrain.errors import UserError

MIB = 2**20
SETTINGS_BYTES = MIB  # a config.yaml: ours have some 5 KB
JSON_BYTES = 64 * MIB  # tokenizer.json of the largest vocabularies is 33 MB
MOST_COUNTED = 2**53  # steps, samples, tokens: no run has so many, and such numbers are exact everywhere
DEEPEST = 100  # brackets within brackets


def read_bytes(path: str | Path, most: int) -> bytes:
    """The whole content of a regular file of at most `most` bytes. Raises UserError."""
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise UserError(f"{path} is no file.")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}.") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}.") from error
    if len(content) > most:
        raise UserError(f"{path} has {max(status.st_size, most + 1):,} bytes; at most {most:,} are read.")
    return content


def read_text(path: str | Path, most: int = JSON_BYTES) -> str:
    """As read_bytes, of UTF-8. Raises UserError."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}.") from error


def parse_json(content: bytes | str, where: str) -> Any:
    """The JSON value in `content`. Raises UserError, beginning with `where`, for anything else, or too deep a one."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not valid JSON: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply.") from error
    except ValueError as error:  # also a number of more digits than Python converts
        raise UserError(f"{where} is not valid JSON: {error}.") from error


def read_json(path: str | Path, most: int = JSON_BYTES) -> Any:
    """The JSON value in a file. Raises UserError."""
    return parse_json(read_bytes(path, most), str(path))


def read_json_object(path: str | Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError, also for another kind of value."""
    content = read_json(path, most)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a JSON object.")
    return content


def read_yaml(path: str | Path, most: int = SETTINGS_BYTES) -> dict[str, Any]:
    """The mapping in a YAML file, in plain values; `${...}` in it is text (see `literal`). Raises UserError.

    Values are understood as OmegaConf understands them (1e-4 is a number). Aliases are refused.
    """
    text = read_text(path, most)
    try:
        content = yaml.load(text, Loader=_loader())  # a SafeLoader's subclass
    except RecursionError as error:
        raise UserError(f"{path} is nested deeper than {DEEPEST} levels.") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:  # ValueError: a date of a 13th month
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings, one `name: value` a line.")
    return content


def literal(value: Any) -> Any:
    """The same plain values such that OmegaConf finds no interpolation in them: each text comes back as it is."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value


def is_count(value: Any) -> bool:
    """Whether the value is a whole number from 0 up, as steps, samples and tokens are counted."""
    return type(value) is int and 0 <= value < MOST_COUNTED


def _loader() -> type[yaml.SafeLoader]:
    class Loader(get_yaml_loader()):  # type: ignore[misc]
        """OmegaConf's loader without aliases, and of bounded depth."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not read")
            self.depth += 1
            if self.depth > DEEPEST:
                raise RecursionError
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader


COMPRESSIONS = (".gz", ".xz", ".zst")

BROKEN_FILE_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
"""What reading a damaged or truncated compressed file raises."""

CHUNK = 1 << 20
ZSTD_CHUNK = 512  # its decompressor gives all that its input holds at once, up to 32,768 times as much
GZIP_CHUNK = 4096  # likewise, up to 1,032 times as much
MOST_PADDING = 1 << 20  # bytes of zeros after a frame; tapes have blocks of 10 KiB, a hole in a file may be terabytes
LARGEST_WINDOW = 128 << 20  # bytes that unpacking may keep: as `zstd` itself; twice what the strongest `xz -9` needs
DEFAULT_LONGEST = 256 << 20  # bytes of one document, where no setting says otherwise
MOST_TIMES = 1_000  # a file's own size, that all of its texts may have: compressed text has 2 to 10, repeated text 100


def open_binary(path: Path) -> BinaryIO:
    """The file's content as uncompressed bytes. Raises one of BROKEN_FILE_ERRORS, now or while it is read."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, io.BufferedReader(_GzipFile(path), CHUNK))
    if suffix == ".xz":
        return cast(BinaryIO, io.BufferedReader(_XzFile(path), CHUNK))
    if suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(path), CHUNK))
    return path.open("rb")


def read_whole(path: Path, longest: int, setting: str | None = "data.longest_document") -> bytearray:
    """The file's content, of at most `longest` bytes uncompressed. Raises UserError above, else as open_binary.

    setting: its name in the error; None where there is none.
    """
    content = bytearray()
    with open_binary(path) as file:
        while piece := file.read(min(CHUNK, longest + 1 - len(content))):
            content += piece
            if len(content) > longest:
                raise too_long(str(path), longest, setting)
    return content


def too_long(where: str, longest: int, setting: str | None = "data.longest_document") -> UserError:
    """The error of a document of more than `longest` bytes."""
    more = f"; {setting}=... allows more" if setting else ""
    return UserError(f"{where}: one document of more than {longest:,} bytes of text{more}.")


class UnpackedSize:
    """Counts what a file's texts come to: a small one of repeated rows may hold terabytes, each text of fair length."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = max(DEFAULT_LONGEST, MOST_TIMES * path.stat().st_size)

    def add(self, count: int) -> None:
        """UserError: the file's texts are more than MOST_TIMES its size by now, and more than DEFAULT_LONGEST."""
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"{self._path}: unpacks to more than {MOST_TIMES:,} times its size: it repeats itself, or is a bomb;"
                " if it is meant, give it uncompressed, as .jsonl."
            )


class MadeBytes(io.RawIOBase):
    """A file whose bytes are made of another's, piece by piece."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._ready = memoryview(b"")

    @abstractmethod
    def _make(self) -> bool:
        """Have the next bytes ready, or none yet; False where the file ends."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """As many bytes as there are, or as fit."""
        while not self._ready:
            if not self._make():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _UnpackedFile(MadeBytes):
    """A file of one or many compressed frames, none of which may end midway.

    fsspec opens compressed files by the readers of gzip, lzma and zstandard, whose gaps are told below.
    """

    chunk = CHUNK
    padding = b""  # bytes that may stand between two frames

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("rb"))
        self._frame: Any = None  # the decompressor of the current frame

    @abstractmethod
    def _new_frame(self) -> Any: ...

    def _unpacked(self, packed: bytes) -> bytes:
        """What the frame gives for more input, or without any."""
        return cast(bytes, self._frame.decompress(packed))

    def _begin_frame(self) -> bool:
        """Begin the next frame with what the last one left over; False where the file ends."""
        packed = b"" if self._frame is None else self._frame.unused_data.lstrip(self.padding)
        skipped = 0
        while not packed:
            read = self._file.read(self.chunk)
            packed = read if self._frame is None else read.lstrip(self.padding)
            skipped += len(read) - len(packed)
            if skipped > MOST_PADDING:
                raise OSError(f"more than {MOST_PADDING:,} zeros follow a compressed frame")
            if not read:
                return False
        self._frame = self._new_frame()
        self._ready = memoryview(self._unpacked(packed))
        return True

    def _make(self) -> bool:
        if self._frame is None or self._frame.eof:
            return self._begin_frame()
        hungry = getattr(self._frame, "needs_input", True)  # lzma's may have more of what it got
        packed = self._file.read(self.chunk) if hungry else b""
        if hungry and not packed:
            raise EOFError("the file ends in the middle of a compressed frame")
        self._ready = memoryview(self._unpacked(packed))
        return True


class _ZstdFile(_UnpackedFile):
    """zstandard's own reader does not notice a frame that ends midway."""

    chunk = ZSTD_CHUNK

    def _new_frame(self) -> Any:
        return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()


class _GzipFile(_UnpackedFile):
    """gzip's own reader goes through the zeros after a frame one by one, hours for a hole of some GiB."""

    chunk = GZIP_CHUNK
    padding = b"\0"

    def _new_frame(self) -> Any:
        return zlib.decompressobj(zlib.MAX_WBITS | 16)  # with gzip's header, and its sum and length at the end


class _XzFile(_UnpackedFile):
    """lzma's own reader knows no limit of memory."""

    padding = b"\0"

    def _new_frame(self) -> Any:
        return lzma.LZMADecompressor(memlimit=LARGEST_WINDOW)

    def _unpacked(self, packed: bytes) -> bytes:
        return cast(bytes, self._frame.decompress(packed, CHUNK))
