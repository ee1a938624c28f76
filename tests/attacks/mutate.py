"""Files changed by chance, each in ways of its format: bytes of any, values of those that hold some.

Every function takes the random generator, the file, and Lures: paths and words that a reader must not follow.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEEP = "@deep@"  # stands for brackets within brackets until the text is written
LONG = 300_000  # characters: longer than a field of Python's csv may be


@dataclass(frozen=True)
class Lures:
    """canary: the folder that nothing may touch. folder: of the file that is changed."""

    canary: Path
    folder: Path

    def paths(self) -> list[str]:
        """A file of the canary, as a hostile file would name it."""
        victim, best = self.canary / "victim", self.canary / "best.ckpt"
        relative = os.path.relpath(victim, self.folder)
        return [
            str(victim), f"local://{victim}", f"local://{best}", f"file://{victim}", str(best), relative,
            f"{self.folder}/{relative}", f"{self.folder}/{os.path.relpath(best, self.folder)}",
            "../canary/victim", "~/../canary/victim", str(self.canary / "folder-0"), f"{self.canary}/made/anew",
        ]  # fmt: skip


def value(chosen: random.Random, lures: Lures, old: Any = None) -> Any:
    """A value that a reader may not expect in the old one's place."""
    numbers: list[Any] = [0, -1, 1, 3, 7, 10**9, 2**31, 2**63, 10**30, 1.5, -0.0, 1e300, float("nan"), float("inf")]
    texts: list[Any] = [
        "", " ", "x", "7", "1e9", "nan", "null", "\x1b[2J\x1b[31mred\x07", "\u202egnp", "a\nb\r\x00", "é日本", "\ud800",
        "${oc.env:CANARY}", "${context}", "x" * LONG, "=cmd|' /C calc'!A1", "__import__('os').system('true')",
        "<|endoftext|>", "cuda", "sdpa", "../../..", *lures.paths(),
    ]  # fmt: skip
    others: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": 1}, [{}] * 3, list(range(5000)), DEEP]
    near: list[Any] = []
    if isinstance(old, bool):
        near = [not old]
    elif isinstance(old, int | float):
        near = [-old, old + 1, old * 1000, -1, str(old), float("nan"), 10**12, float(old)]
    elif isinstance(old, str):
        near = [old + "x", old[:-1], old.upper(), *lures.paths()]
    elif isinstance(old, list | tuple):
        near = [list(old) * 2, list(old)[:-1], [list(old)], dict(enumerate(old))]
    elif isinstance(old, dict):
        near = [list(old), list(old.values()), {str(key): None for key in old}]
    pools = [pool for pool in (near, near, numbers, texts, others) if pool]
    return chosen.choice(chosen.choice(pools))


def structure(chosen: random.Random, content: Any, lures: Lures) -> Any:
    """The same nested lists and dictionaries with one to three places changed; tensors are shared with the old ones."""
    content = _copied(content)
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        holder, key = _place(chosen, content)
        if holder is None:
            return value(chosen, lures, content)
        how = chosen.random()
        if how < 0.15:
            del holder[key]
        elif how < 0.25 and isinstance(holder, dict):
            name = chosen.choice(("extra", "", 7, "model", "../../x", "state", "shape", "\x1b[31m"))
            holder[name] = value(chosen, lures)
        else:
            old = holder[key]
            holder[key] = _tensor(chosen, old) if hasattr(old, "dtype") else value(chosen, lures, old)
    return content


def whole(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Put something else in the file's place. Returns what."""
    forms: dict[str, Callable[[], object]] = {
        "empty": lambda: path.write_bytes(b""),
        "missing": path.unlink,
        "folder": lambda: (path.unlink(), path.mkdir()),
        "pipe": lambda: (path.unlink(), os.mkfifo(path)),
        "link to the canary": lambda: (path.unlink(), path.symlink_to(lures.canary / "victim")),
        "link to itself": lambda: (path.unlink(), path.symlink_to(path.name)),
        "link to an endless device": lambda: (path.unlink(), path.symlink_to("/dev/zero")),
        "huge and sparse": lambda: os.truncate(path, 16 * 2**30),
        "text": lambda: path.write_text("this is a text and nothing else\n" * 3),
        "deep": lambda: path.write_text("[" * 100_000 + "]" * 100_000),
        "deep objects": lambda: path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000),
        "long number": lambda: path.write_text("1" * 100_000),
        "noise": lambda: path.write_bytes(chosen.randbytes(5000)),
        "zeros": lambda: path.write_bytes(b"\x00" * 5000),
        "long line": lambda: path.write_bytes(b"x" * 5_000_000),
        "escapes": lambda: path.write_bytes(b"\x1b[2J\x1b]0;owned\x07\n" * 10),
        "a pickle that runs": lambda: path.write_bytes(pickle.dumps(_Runs(f"touch {lures.canary}/ran"))),
    }
    name = chosen.choice(sorted(forms))
    forms[name]()
    return name


def some_bytes(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Change the file's bytes. Returns how."""
    content = bytearray(path.read_bytes())
    how = chosen.choice(("cut", "flipped", "flipped", "zeroed", "doubled", "inserted", "swapped", "appended"))
    place = chosen.randrange(len(content) + 1)
    # The ends of a file hold what says how the rest is read.
    if chosen.random() < 0.5:
        near_the_end = max(0, len(content) - chosen.randrange(1, 600))
        place = chosen.choice((min(len(content), chosen.randrange(200)), near_the_end))
    length = chosen.choice((1, 4, 16, 512, 4096))
    if how == "cut":
        del content[place:]
    elif how == "flipped":
        for _ in range(chosen.choice((1, 3, 20))):
            if content:
                content[min(len(content) - 1, max(0, place + chosen.randrange(-200, 200)))] ^= 1 << chosen.randrange(8)
    elif how == "zeroed":
        content[place : place + length] = bytes(len(content[place : place + length]))
    elif how == "doubled":
        content += bytes(content)
    elif how == "inserted":
        content[place:place] = chosen.choice((chosen.randbytes(length), b"\x1b[31m", b"\x00", b"\xff\xfe", b"[" * 5000))
    elif how == "swapped":
        content[place : place + length] = chosen.randbytes(len(content[place : place + length]))
    else:
        content += chosen.choice((chosen.randbytes(length), b"\n" * length, b"}" * length))
    path.write_bytes(content)
    return how


def json_file(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Change a JSON file's values."""
    path.write_text(json_text(structure(chosen, json.loads(path.read_text()), lures)))
    return "values"


def json_lines(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Change some lines of a .jsonl file."""
    lines = path.read_text().splitlines()
    for _ in range(chosen.choice((1, 2))):
        place = chosen.randrange(len(lines))
        lines[place] = json_text(structure(chosen, json.loads(lines[place]) if lines[place][:1] == "{" else {}, lures))
    path.write_text("\n".join(lines))
    return "values"


def json_text(content: Any) -> str:
    """JSON, with nan, and with brackets within brackets where DEEP stands."""
    return json.dumps(content, default=str).replace(f'"{DEEP}"', "[" * 20_000 + "]" * 20_000)


def yaml_file(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Change a YAML file's values, or add what only YAML has."""
    import yaml

    text = path.read_text()
    bomb = "\n".join(f"b{n}: &b{n} [{','.join([f'*b{n - 1}'] * 9) if n else 'x'}]" for n in range(9))
    added = {
        "aliases": bomb,
        "a tag": "prompt: !!python/object/apply:os.system ['true']",
        "a name twice": "context: 5\ncontext: 7",
        "a secret": "prompt: ${oc.env:CANARY}\nrecipe: ${oc.env:CANARY}",
        "a date": "prompt: 2026-13-45",
        "depth": "prompt: " + "[" * 5000 + "]" * 5000,
        "a tab": "\tprompt: x",
        "documents": "---\na: 1\n---\nb: 2",
        "a merge": "x: &x {a: 1}\n<<: *x",
        "a binary": "prompt: !!binary gIGC",
        "control characters": 'prompt: "\\x1b[31m\\x07"',
    }
    if chosen.random() < 0.35:
        how = chosen.choice(sorted(added))
        first = added[how].splitlines()[0].split(":")[0]
        kept = [line for line in text.splitlines() if not line.startswith((f"{first}:",))]
        path.write_text("\n".join([*kept, added[how]]) + "\n")
        return how
    changed = structure(chosen, yaml.safe_load(text), lures)
    if chosen.random() < 0.3 and isinstance(changed, dict):
        group = changed.get(chosen.choice(("data", "sequence", "pathfinder")))
        changed["output"] = str(lures.canary / "out")
        if isinstance(group, dict):
            group["cache_dir"] = str(lures.canary / "cache")
    deep = "[" * 3000 + "]" * 3000
    path.write_text(yaml.safe_dump(changed, allow_unicode=False).replace(f"'{DEEP}'", deep))
    return "values"


def csv_file(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Change a table's cells, its rows or its header."""
    rows = list(csv.reader(io.StringIO(path.read_text())))
    for _ in range(chosen.choice((1, 2, 4))):
        row = chosen.choice(rows)
        how = chosen.random()
        if how < 0.7 and row:
            row[chosen.randrange(len(row))] = str(value(chosen, lures)).replace("\ud800", "")
        elif how < 0.8:
            row.append("more")
        elif how < 0.9 and row:
            row.pop()
        else:
            rows.insert(chosen.randrange(len(rows)), list(chosen.choice(rows)))
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path.write_text(text.getvalue())
    return "cells"


def npy_file(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Give an array another header, or another array."""
    import numpy as np

    array = np.load(path)
    forms = [
        ("'|O'", False, f"({len(array)},)"),
        ("'<i8'", False, f"({10**15},)"),
        ("'<i8'", True, "(-1,)"),
        ("'<i8'", False, "()"),
        ("[('a', '<i8'), ('b', '|O')]", False, "(2,)"),
        ("'<f8'", False, f"({len(array)}, 1)"),
        ("'|V99999999'", False, "(1,)"),
    ]
    headers = [f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}" for kind, order, shape in forms]
    headers += ["__import__('os').system('true')", "(" * 5000]
    if chosen.random() < 0.5:
        header = chosen.choice(headers).encode()
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + array.tobytes())
        return "header"
    changed = chosen.choice(
        (-array, array[::-1], array * 10**6, array[:-1], array.astype("float32"), array[:0], np.array(7),
         array[:, None], np.repeat(array, 2), array + 1, np.zeros_like(array), array.astype("int16"),
         array.astype("complex64"))
    )  # fmt: skip
    np.save(path, changed)
    return "array"


def checkpoint(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Change what a checkpoint's dictionary holds, and save it again."""
    import torch

    content = torch.load(path, map_location="cpu", weights_only=True)
    how = chosen.random()
    if how < 0.3:
        content = lured(chosen, _copied(content), lures)
        told = "paths"
    elif how < 0.35:
        content["extra"] = _Runs(f"touch {lures.canary}/ran")
        told = "a pickle that runs"
    else:
        part = chosen.choice([*content, *content, None])
        if part is None or isinstance(content[part], str | int | float):
            content = structure(chosen, content, lures)
        else:
            content[part] = structure(chosen, content[part], lures)
        told = f"values of {part}"
    torch.save(_shallow(content), path)
    return told


def lured(chosen: random.Random, content: Any, lures: Lures) -> Any:
    """Every path that a callback remembers leads to the canary, as of a run that was always in this folder."""
    factor = chosen.choice((1, 1, 100))  # of scores: equal to what best.ckpt has, or worse than all
    for state in content.get("callbacks", {}).values():
        if not isinstance(state, dict):
            continue
        bait = chosen.choice(lures.paths())
        for key, old in list(state.items()):
            if key == "dirpath":
                state[key] = chosen.choice((str(lures.folder), str(lures.folder), str(lures.canary)))
            elif isinstance(old, str) and "/" in old:
                state[key] = bait
            elif key == "best_k_models" and isinstance(old, dict):
                state[key] = dict.fromkeys([bait], next(iter(old.values()), 0) * factor)
            elif key in ("best_model_score", "kth_value", "current_score") and hasattr(old, "dtype"):
                state[key] = old * factor
    return content


def safetensors(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Change the header of a safetensors file: names, types, shapes, places, notes."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    if chosen.random() < 0.15:
        lengths = (0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1)
        path.write_bytes(struct.pack("<Q", chosen.choice(lengths)) + content[8:])
        return "header's length"
    header = json.loads(content[8 : 8 + length])
    notes = header.get("__metadata__", {}).get("flashtrain")
    if notes and chosen.random() < 0.6:
        told = structure(chosen, json.loads(notes), lures)
        if chosen.random() < 0.4 and isinstance(told, dict):
            name = chosen.choice(("cache_dir", "path", "data", "name", "workers", "preview", "x=1 hydra.run.dir"))
            told["sequence"] = {name: chosen.choice((str(lures.canary), "${oc.env:CANARY}", 10**9, "[1,2", None))}
        header["__metadata__"]["flashtrain"] = json_text(told)
    else:
        header = structure(chosen, header, lures)
    text = json_text(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return "header"


def parquet(chosen: random.Random, path: Path, lures: Lures) -> str:
    """Another table in a parquet file's place."""
    import pyarrow as pa
    import pyarrow.parquet

    columns = {
        "numbers": pa.array([1, 2, 3]),
        "nulls": pa.array([None, None], pa.string()),
        "binary": pa.array([b"\xff\xfe", b"\x00"]),
        "lists": pa.array([["a"], ["b"]]),
        "words": pa.array(["a b " * 50, "c d " * 50]).dictionary_encode(),
        "nothing": pa.array([], pa.string()),
        "much": pa.array(["a" * 50_000_000]),
        "escapes": pa.array(["\x1b[31m" * 100] * 5),
    }
    how = chosen.choice(sorted(columns))
    names = [chosen.choice(("text", "text", "text", "\x1b[31mtext", "other"))]
    pyarrow.parquet.write_table(pa.table([columns[how]], names=names), path, compression="zstd")
    return how


class _Runs:
    """What runs a program when it is unpickled."""

    def __init__(self, program: str) -> None:
        self.program = program

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.program,)


def _copied(content: Any) -> Any:
    if isinstance(content, dict):
        copy = content.copy()
        for key in copy:
            copy[key] = _copied(copy[key])
        return copy
    if isinstance(content, list):
        return [_copied(item) for item in content]
    return content


def _shallow(content: Any) -> Any:
    """As torch.save can write it: brackets to a depth that pickle reaches."""
    if isinstance(content, dict):
        return type(content)((key, _shallow(item)) for key, item in content.items())
    if isinstance(content, list):
        return [_shallow(item) for item in content]
    if isinstance(content, str) and content == DEEP:
        deep: list[Any] = []
        for _ in range(90):
            deep = [deep]
        return deep
    return content


def _place(chosen: random.Random, content: Any) -> tuple[Any, Any]:
    """(a dictionary or list somewhere inside, a key of it), each depth as likely; (None, None) where there is none."""
    holder: Any = None
    key: Any = None
    inner = content
    while isinstance(inner, dict | list) and inner:
        holder, key = inner, chosen.choice(list(inner)) if isinstance(inner, dict) else chosen.randrange(len(inner))
        inner = inner[key]
        if chosen.random() < 0.15:
            break
    return holder, key


def _tensor(chosen: random.Random, old: Any) -> Any:
    import torch

    if not isinstance(old, torch.Tensor):
        return None
    wide = torch.zeros(1).expand(10**6, 10**5) if chosen.random() < 0.3 else torch.full_like(old.float(), float("inf"))
    return chosen.choice(
        (old.double(), old.to(torch.int64), old.flatten()[:0], old.flatten(), old[None], old.float() * float("nan"),
         None, old > 0, old.to(torch.complex64), old.to(torch.bfloat16), wide, old.flatten()[:3].tolist(), "tensor",
         torch.tensor(-1), old.float().to_sparse() if old.dim() else old.float())
    )  # fmt: skip
