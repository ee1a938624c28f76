"""python mutated_files.py FOLDER SEED COUNT: files of every kind that the data path reads, damaged and read again.

Each is a sound file in which bytes were changed, dropped, doubled or put in, COUNT times over. Whatever was done to it,
a reader gives values or a UserError, within 4 GiB; anything else is printed, with what repeats it. Exit status 1 then.
"""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import pickle
import random
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from flashtrain.data.labelled_documents import labelled_rows
from flashtrain.data.sequences import Sequences, SequenceShape
from flashtrain.data.sources import FilesSource
from flashtrain.data.token_builder import open_or_build
from flashtrain.data.token_cache import checksum
from flashtrain.data.tokenizers import TokenizerSpec
from flashtrain.errors import UserError
from flashtrain.files.npy_files import DamagedArrayError, read_npz
from flashtrain_recipes.arena.image import GreyImages
from flashtrain_recipes.arena.sequence_rows import open_or_build as open_sequences
from flashtrain_recipes.arena.text import ByteText, Retrieval

LIMIT = 4 * 2**30
TEXT = "Many plain words, é and ü, stand on lines such as these.\n" * 40
LINES = "".join(json.dumps({"text": f"{TEXT[:200]} {n}", "labels": ["a"], "label": n % 2}) + "\n" for n in range(30))
ODD = (
    b"\0",
    b"\xff" * 8,
    b"9" * 40,
    b"[" * 2000,
    b'"',
    b"\n",
    b"../",
    b"\x80\x02",
    b"-1",
    b"1e999",
    b"null",
    b"\xff\xff\xff\x7f",
)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with one to four things done to it."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1) if draw.random() < 0.7 else draw.randrange(min(200, len(data)) + 1)
        length = draw.choice((1, 2, 8, 100, len(data) // 2))
        kind = draw.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = data[at : at + length]
        elif kind == 3:
            data[at:at] = draw.choice(ODD)
        elif kind == 4:
            data[at : at + 4] = draw.randbytes(4)
        else:
            odd = draw.choice(ODD)
            data[at : at + len(odd)] = odd
    return bytes(data)


def files_of(name: str, content: bytes) -> Callable[[Path], tuple[Path, Callable[[], object]]]:
    """A text file, or table of texts."""

    def make(folder: Path) -> tuple[Path, Callable[[], object]]:
        path = folder / name
        path.write_bytes(content)
        encoding = "utf-16" if "utf-16" in name else "utf-8"
        return path, lambda: [len(text) for text in FilesSource(path, encoding=encoding).documents()]

    return make


def parquet(**options: object) -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"text": [TEXT[:n] for n in range(300)], "label": [n % 2 for n in range(300)]})
    pyarrow.parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def token_cache(part: str) -> Callable[[Path], tuple[Path, Callable[[], object]]]:
    """A file of a token cache; its notes then tell of the file as it is, as somebody's who wants it believed would."""

    def make(folder: Path) -> tuple[Path, Callable[[], object]]:
        (folder / "text.txt").write_text(TEXT)
        source, kind = FilesSource(folder / "text.txt"), TokenizerSpec("bpe", 300)
        cache = open_or_build(source, kind, folder / "cache")

        def read() -> object:
            meta = cache.folder / "meta.json"
            if part != "meta.json":
                told = json.loads(meta.read_text())
                path = cache.folder / part
                told["files"][part] = {"bytes": path.stat().st_size, "checksum": checksum(path)}
                meta.write_text(json.dumps(told))
            found = open_or_build(source, kind, folder / "cache")
            return found.tokens.sum(), found.offsets[:], found.tokenizer.decode(found.tokens[:9])

        return cache.folder / part, read

    return make


def sequences(part: str) -> Callable[[Path], tuple[Path, Callable[[], object]]]:
    """A file of kept sequences."""

    def make(folder: Path) -> tuple[Path, Callable[[], object]]:
        sound = Sequences(np.arange(90, dtype=np.uint8) % 9, np.arange(31) * 3, np.arange(30, dtype=np.uint8) % 2)
        shape = SequenceShape(2, 3, 9)
        open_sequences("some", lambda: sound, folder, shape)
        return folder / "some" / part, lambda: open_sequences("some", lambda: sound, folder, shape).chosen(
            np.arange(30)
        )

    return make


def scores(folder: Path) -> tuple[Path, Callable[[], object]]:
    """Kept losses."""
    path = folder / "scores.npz"
    np.savez(path, key=np.array("x" * 32), whole=np.ones((3, 4), np.float32))
    return path, lambda: read_npz(path, {"key": ("<U32", ()), "whole": ("float32", (3, 4))})


def pickled(folder: Path) -> tuple[Path, Callable[[], object]]:
    """CIFAR-10 of the python version."""
    content = pickle.dumps({b"data": np.zeros((3, 3072), np.uint8), b"labels": [1, 2, 3]}, protocol=2)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / name).write_bytes(content)

    def read() -> object:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        source = GreyImages(folder, validation=2, cache_dir=folder / "cache")
        source.prepare()
        return source.split("train")[[0]]

    return folder / "data_batch_1", read


def labelled(folder: Path) -> tuple[Path, Callable[[], object]]:
    """Labelled texts."""
    (folder / "train.jsonl").write_text(LINES)
    return folder / "train.jsonl", lambda: labelled_rows(folder)


def reviews(kind: str) -> Callable[[Path], tuple[Path, Callable[[], object]]]:
    """Reviews in a table."""

    def make(folder: Path) -> tuple[Path, Callable[[], object]]:
        for part in ("train", "test"):
            (folder / f"{part}.{kind}").write_bytes(LINES.encode() if kind == "jsonl" else parquet())

        def read() -> object:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            return ByteText(folder, length=64, validation=1, cache_dir=folder / "cache").split("train")[[0]]

        return folder / f"train.{kind}", read

    return make


def pairs(folder: Path) -> tuple[Path, Callable[[], object]]:
    """Pairs of papers."""
    path = folder / "x.train.tsv"
    path.write_text("1.0\ta\tb\tone paper\tanother\n0.0\tc\td\tthird\tfourth\n" * 9)

    def read() -> object:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return Retrieval(folder, length=64, cache_dir=folder / "cache").split("train")[[0]]

    return path, read


KINDS: dict[str, Callable[[Path], tuple[Path, Callable[[], object]]]] = {
    "txt": files_of("a.txt", TEXT.encode()),
    "utf-16": files_of("utf-16.txt", TEXT.encode("utf-16")),
    "txt.gz": files_of("a.txt.gz", gzip.compress(TEXT.encode())),
    "txt.xz": files_of("a.txt.xz", lzma.compress(TEXT.encode())),
    "txt.zst": files_of("a.txt.zst", zstandard.compress(TEXT.encode())),
    "jsonl": files_of("a.jsonl", LINES.encode()),
    "utf-16.jsonl": files_of("utf-16.jsonl", LINES.encode("utf-16")),
    "jsonl.zst": files_of("a.jsonl.zst", zstandard.compress(LINES.encode())),
    "parquet": files_of("a.parquet", parquet()),
    "parquet plain": files_of("a.parquet", parquet(use_dictionary=False, compression="none")),
    "parquet zstd": files_of("a.parquet", parquet(compression="zstd", data_page_version="2.0")),
    "parquet delta": files_of("a.parquet", parquet(use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})),
    "parquet delta lengths": files_of(
        "a.parquet", parquet(use_dictionary=False, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"})
    ),
    "meta.json": token_cache("meta.json"),
    "tokens.bin": token_cache("tokens.bin"),
    "documents.npy": token_cache("documents.npy"),
    "tokenizer.json": token_cache("tokenizer/tokenizer.json"),
    "tokens.npy": sequences("tokens.npy"),
    "offsets.npy": sequences("offsets.npy"),
    "labels.npy": sequences("labels.npy"),
    "scores": scores,
    "pickle": pickled,
    "labelled": labelled,
    "reviews": reviews("jsonl"),
    "reviews parquet": reviews("parquet"),
    "pairs": pairs,
}


def main() -> int:
    """Exit status 1 where anything but values and UserErrors came of a file."""
    base, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    only = sys.argv[4:] or list(KINDS)
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    failures = refused = 0
    for kind in only:
        folder = base / kind.replace(" ", "-")
        folder.mkdir(parents=True)
        path, read = KINDS[kind](folder)
        read()
        sound = path.read_bytes()
        for number in range(count):
            repeat = f"{kind}, seed {seed}, number {number}"
            print(f"reading {repeat}", file=sys.stderr, flush=True)  # the last line, where the process dies
            draw = random.Random(f"{seed} {kind} {number}")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(mutated(sound, draw))
            try:
                read()
            except (UserError, DamagedArrayError) as error:
                refused += 1
                if len(str(error).splitlines()) != 1:
                    failures += 1
                    print(f"{repeat}: {str(error)!r}")
            except Exception:  # noqa: BLE001 whatever it is, it is what is looked for
                failures += 1
                print(f"{repeat}:\n{traceback.format_exc()}")
    print(f"{count * len(only)} files, {refused} refused, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
