"""Sets on disk: the same images however they came there, and nothing half written is believed."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import numpy as np
import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder import generate
from flashtrain_recipes.arena.pathfinder.generate import HEADER_BYTES, ImageStream, generate_records
from flashtrain_recipes.arena.pathfinder.parameters import of_side
from flashtrain_recipes.arena.pathfinder.records import record_type
from flashtrain_recipes.arena.pathfinder.store import PathfinderImages, ensure

pytestmark = pytest.mark.slow  # numba compiles the walks

EXPECTED = 900  # more than three chunks
STREAM = ImageStream(of_side(32), 5, "train")


@pytest.fixture(scope="module")
def whole() -> bytes:
    return generate_records(STREAM, 0, EXPECTED).tobytes()


def stored(images: PathfinderImages) -> bytes:
    return images.path.read_bytes()[HEADER_BYTES:]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_set_is_the_same_from_one_thread_and_from_two(
    whole: bytes, tmp_path: Path, monkeypatch, threads
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(threads), raising=False)
    assert stored(ensure(32, 5, EXPECTED, cache_dir=tmp_path)) == whole


def test_a_set_grows_and_keeps_its_first_images(whole: bytes, tmp_path: Path) -> None:
    few = ensure(32, 5, 300, cache_dir=tmp_path)
    before = few.labels
    more = ensure(32, 5, EXPECTED, cache_dir=tmp_path)
    assert stored(more) == whole
    assert np.array_equal(more.labels[:300], before)
    assert np.array_equal(few.labels, before)
    assert len(ensure(32, 5, 10, cache_dir=tmp_path)) == 10


def test_an_interrupted_generation_goes_on_where_it_ended(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def interrupted(stream: ImageStream, first: int, count: int) -> np.ndarray:
        asked.append(first)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return generate_records(stream, first, count)

    monkeypatch.setattr(generate, "generate_records", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure(32, 5, EXPECTED, cache_dir=tmp_path)
    assert stored(ensure(32, 5, EXPECTED, cache_dir=tmp_path)) == whole
    assert asked[:3] == [0, 256, 512]
    assert asked.count(0) == asked.count(256) == 1


@pytest.mark.parametrize("damage", ["half a record", "zeros", "a changed byte"])
def test_a_half_written_end_is_not_believed(whole: bytes, tmp_path: Path, damage: str) -> None:
    path = ensure(32, 5, 600, cache_dir=tmp_path).path
    size = record_type(of_side(32)).itemsize
    data = bytearray(path.read_bytes())
    if damage == "half a record":
        del data[-size // 2 :]
    elif damage == "zeros":
        data[-40 * size - 7 :] = bytes(40 * size + 7)
    else:
        data[-30 * size] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="whole images, and 600 were requested"):
        PathfinderImages(path, STREAM, 600)
    assert stored(ensure(32, 5, EXPECTED, cache_dir=tmp_path)) == whole


def test_a_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    path = ensure(32, 5, 1, cache_dir=tmp_path).path
    with ThreadPoolExecutor(1) as pool:
        with filelock.FileLock(f"{path}.lock"):
            waiting = pool.submit(ensure, 32, 5, 10, cache_dir=tmp_path)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
        assert len(waiting.result()) == 10


def test_splits_share_no_image(tmp_path: Path) -> None:
    sets = [
        ensure(32, 5, 100, split=split, cache_dir=tmp_path)
        for split in ("train", "validation", "test")
    ]
    assert len({images.path for images in sets}) == 3
    pictures = {
        row.numpy().tobytes() for images in sets for row in images.strokes(slice(None))["windows"]
    }
    assert len(pictures) == 300


@pytest.mark.integration
def test_reading_and_drawing_need_no_numba(tmp_path: Path) -> None:
    path = ensure(32, 5, 20, cache_dir=tmp_path).path
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from flashtrain_recipes.arena.pathfinder.store import ensure\n"
        "from flashtrain_recipes.arena.pathfinder.raster import rasterise\n"
        f"images = ensure(32, 5, 20, cache_dir={str(tmp_path)!r})\n"
        "strokes = images.strokes([1])\n"
        "print(rasterise(strokes['windows'], strokes['markers'], images.parameters).shape)\n"
        f"ensure(32, 5, 21, cache_dir={str(tmp_path)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "torch.Size([1, 32, 32])" in done.stdout, path
    assert "needs numba, which cannot be imported here" in done.stderr.splitlines()[-1]
