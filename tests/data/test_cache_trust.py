"""Caches on disk are not believed: each field, header and number is checked, and what is odd is made anew."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from flashtrain.data import token_cache
from flashtrain.data.masking import TokenBreaks, split_pieces
from flashtrain.data.packing import PackedSamples, Spans
from flashtrain.data.sequences import Sequences, SequenceShape
from flashtrain.data.token_builder import open_or_build
from flashtrain.data.token_cache import DamagedCacheError, checksum, open_cache
from flashtrain.data.tokenizers import ByteTokenizer, TokenizerSpec
from flashtrain.errors import UserError
from flashtrain.files.npy_files import DamagedArrayError, map_npy, read_npz
from flashtrain_recipes.arena.image import GreyImages
from flashtrain_recipes.arena.sequence_rows import open_or_build as open_sequences

BYTES = TokenizerSpec("bytes")


def notes(folder: Path, **changes) -> None:
    """Write meta.json with other values, and with sizes and checksums that fit the files as they are now."""
    told = {**json.loads((folder / "meta.json").read_text()), **changes}
    if "files" not in changes:
        told["files"] = {
            name: {"bytes": (folder / name).stat().st_size, "checksum": checksum(folder / name)}
            for name in told["files"]
        }
    (folder / "meta.json").write_text(json.dumps(told))


def as_objects(folder: Path) -> None:
    notes(folder, dtype="O")


def as_halves(folder: Path) -> None:
    notes(folder, dtype="float16")


def as_bytes(folder: Path) -> None:
    notes(folder, dtype="uint8", tokens=2 * json.loads((folder / "meta.json").read_text())["tokens"])


def count_as_text(folder: Path) -> None:
    notes(folder, tokens="12")


def count_as_truth(folder: Path) -> None:
    notes(folder, documents=True)


def a_field_more(folder: Path) -> None:
    notes(folder, more=1)


def a_list(folder: Path) -> None:
    (folder / "meta.json").write_text("[]")


def nested(folder: Path) -> None:
    (folder / "meta.json").write_text("[" * 100_000)


def outside(folder: Path) -> None:
    target = folder.parent / "elsewhere"
    target.write_text("x")
    named = {"bytes": 1, "checksum": checksum(target)}
    notes(folder, files={**json.loads((folder / "meta.json").read_text())["files"], "../elsewhere": named})


def size_as_text(folder: Path) -> None:
    files = json.loads((folder / "meta.json").read_text())["files"]
    notes(folder, files={**files, "tokens.bin": {"bytes": "9", "checksum": "x"}})


def no_tokens_named(folder: Path) -> None:
    files = json.loads((folder / "meta.json").read_text())["files"]
    notes(folder, files={"documents.npy": files["documents.npy"]})


def of_another_text(folder: Path) -> None:
    notes(folder, source_fingerprint="of another text")


def an_id_outside(folder: Path) -> None:
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    tokens[3] = 257
    tokens.tofile(folder / "tokens.bin")
    notes(folder)


def offsets(folder: Path, values: np.ndarray, **options) -> None:
    np.save(folder / "documents.npy", values, **options)
    notes(folder)


def out_of_order(folder: Path) -> None:
    offsets(folder, np.array([0, 16, 15]))


def past_the_end(folder: Path) -> None:
    offsets(folder, np.array([0, 10, 2**40]))


def before_the_beginning(folder: Path) -> None:
    offsets(folder, np.array([-5, 10, 15]))


def as_floats(folder: Path) -> None:
    offsets(folder, np.array([0.0, 10.0, 15.0]))


def pickled(folder: Path) -> None:
    offsets(folder, np.array([0, 10, 15], dtype=object), allow_pickle=True)


def two_dimensions(folder: Path) -> None:
    offsets(folder, np.array([[0, 10, 15]]))


def huge_shape(folder: Path) -> None:
    content = (folder / "documents.npy").read_bytes()
    (folder / "documents.npy").write_bytes(content.replace(b"(3,), } ", b"(9**9,)}").replace(b"(9**9,)", b"(10**9)"))
    notes(folder)


def long_shape(folder: Path) -> None:
    content = (folder / "documents.npy").read_bytes()
    (folder / "documents.npy").write_bytes(content.replace(b"(3,), }       ", b"(99999999,), }"))
    notes(folder)


def code_in_the_header(folder: Path) -> None:
    content = bytearray((folder / "documents.npy").read_bytes())
    head = b"(" * 80
    content[10 : 10 + len(head)] = head
    (folder / "documents.npy").write_bytes(content)
    notes(folder)


def another_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    notes(folder)


@pytest.mark.parametrize(
    "damage",
    [
        as_objects, as_halves, as_bytes, count_as_text, count_as_truth, a_field_more, a_list, nested, outside,
        size_as_text, no_tokens_named, of_another_text, an_id_outside, out_of_order, past_the_end,
        before_the_beginning, as_floats, pickled, two_dimensions, huge_shape, long_shape, code_in_the_header,
        another_tokenizer,
    ],
)  # fmt: skip
def test_a_token_cache_with_fitting_checksums_is_rebuilt_all_the_same(list_source, tmp_path, damage, caplog) -> None:
    source = list_source(["some text", "more"])
    cache = open_or_build(source, BYTES, tmp_path)
    before = cache.tokens.tolist()
    damage(cache.folder)
    rebuilt = open_or_build(source, BYTES, tmp_path)
    assert (rebuilt.tokens.tolist(), rebuilt.tokens.dtype) == (before, np.uint16)
    assert rebuilt.offsets.tolist() == [0, 10, 15]
    assert [
        record.getMessage().count("is damaged (") for record in caplog.records if record.levelname == "WARNING"
    ] == [1]


def test_a_sound_cache_is_not_rebuilt_when_its_notes_are_written_again(list_source, tmp_path) -> None:
    source = list_source(["some text", "more"])
    notes(open_or_build(source, BYTES, tmp_path).folder)
    open_or_build(source, BYTES, tmp_path)
    assert source.readings == 1


def test_a_cache_that_is_damaged_as_soon_as_it_is_written_is_one_line(list_source, tmp_path, monkeypatch) -> None:
    class Odd(ByteTokenizer):
        vocab_size = 200

    with pytest.raises(UserError, match=r"was written, and cannot be used: tokens.bin holds token 256"):
        open_or_build(list_source(["text"]), Odd(), tmp_path)


def test_of_a_long_token_file_samples_are_looked_at_and_every_batch(list_source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(token_cache, "WHOLE_CHECKSUM_LIMIT", 1000)
    monkeypatch.setattr(token_cache, "BLOCK", 10)
    monkeypatch.setattr(token_cache, "SAMPLED_BLOCKS", 4)
    cache = open_or_build(list_source(["x" * 2000]), BYTES, tmp_path)
    tokens = np.fromfile(cache.tokens_path, np.uint16)
    tokens[100] = 60_000
    tokens.tofile(cache.tokens_path)
    notes(cache.folder)
    found = open_cache(cache.folder)  # the samples are elsewhere
    spans = Spans(found.offsets[:-1], found.offsets[1:])
    samples = PackedSamples(found.tokens_path, "uint16", spans, 64, vocab_size=257)
    assert samples[[0]]["tokens"].max() == ord("x")
    with pytest.raises(UserError, match="holds token 60000, and its tokenizer knows 257: delete the folder"):
        samples[[1]]
    with pytest.raises(UserError, match="holds token 60000"):
        split_pieces(found.tokens, spans, TokenBreaks.of(ByteTokenizer()), unit="sentence", longest=64)
    tokens[-1] = 60_000
    tokens.tofile(cache.tokens_path)
    notes(cache.folder)
    with pytest.raises(DamagedCacheError, match="holds token 60000"):
        open_cache(cache.folder)


def test_an_array_is_mapped_only_where_header_and_size_fit(tmp_path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(5))
    assert map_npy(path, "int64").tolist() == [0, 1, 2, 3, 4]
    np.save(path, np.arange(0))
    assert map_npy(path, "int64").tolist() == []
    for odd in (np.arange(5, dtype=">i8"), np.zeros(5, "i8,i8"), np.int64(3), np.zeros((2, 2), np.int64)):
        np.save(path, odd)
        with pytest.raises(DamagedArrayError):
            map_npy(path, "int64")
    np.save(path, np.arange(5))
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DamagedArrayError, match="not as long as its header says"):
        map_npy(path, "int64")


def test_kept_scores_are_read_only_in_the_shape_that_they_must_have(tmp_path) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, whole=np.ones((2, 3), np.float32))
    assert read_npz(path, {"whole": ("float32", (2, 3))})["whole"].sum() == 6
    for shape, kind in (((3, 2), "float32"), ((2, 4), "float32"), ((2, 3), "float64")):
        with pytest.raises(DamagedArrayError):
            read_npz(path, {"whole": (kind, shape)})
    np.savez(path, whole=np.array([{}], dtype=object))
    with pytest.raises(DamagedArrayError, match="holds object"):
        read_npz(path, {"whole": ("float32", (1,))})
    np.savez_compressed(path, whole=np.zeros(10_000_000, np.float32))
    with pytest.raises(DamagedArrayError):
        read_npz(path, {"whole": ("float32", (3,))})


SHAPE = SequenceShape(classes=2, length=8, vocab_size=10)
SOUND = Sequences(np.array([1, 2, 3], np.uint8), np.array([0, 1, 3]), np.array([0, 1], np.uint8))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("labels", np.array([0, 2], np.uint8)),
        ("labels", np.array([0], np.uint8)),
        ("labels", np.array([0, 1], np.int64)),
        ("tokens", np.array([1, 2, 10], np.uint8)),
        ("tokens", np.array([1, 2], np.uint8)),
        ("offsets", np.array([0, 4, 3])),
        ("offsets", np.array([1, 2, 3])),
        ("offsets", np.array([0, 1, 2**40])),
        ("offsets", np.array([], np.int64)),
        ("tokens", np.array([1, 2, 3], object)),
    ],
)
def test_kept_sequences_that_do_not_fit_one_another_or_the_model_are_refused(tmp_path, field, values) -> None:
    open_sequences("some", lambda: SOUND, tmp_path, SHAPE)
    np.save(tmp_path / "some" / f"{field}.npy", values, allow_pickle=True)
    with pytest.raises(UserError, match=r"some is damaged \(.*delete it, and it is made anew"):
        open_sequences("some", lambda: SOUND, tmp_path, SHAPE)


def batches(folder: Path, content: bytes, name: str = "") -> str:
    for batch in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / f"{batch}{name}").write_bytes(content)
    with pytest.raises(UserError) as caught:
        GreyImages(folder, cache_dir=folder / "cache").prepare()
    return str(caught.value)


def test_pickled_images_neither_take_memory_nor_make_objects_of_bytes(tmp_path) -> None:
    huge = b"\x80\x02N" + b"r" + struct.pack("<I", 2**31 - 1) + b"."  # "remember this at place 2**31 - 1"
    assert "it has more parts than a batch of images" in batches(tmp_path, huge)

    class Array:
        def __reduce__(self):
            return np.core.multiarray._reconstruct, (np.ndarray, (2**36,), b"b")

    class Kind:
        def __reduce__(self):
            return np.dtype, ("O", False, True)

    for odd in (Array(), Kind()):
        assert "is no python batch of CIFAR-10" in batches(tmp_path, pickle.dumps({b"data": odd, b"labels": [1]}))


def test_labels_of_images_that_are_no_classes_are_refused(tmp_path) -> None:
    assert "its labels are not all from 0 to 9" in batches(tmp_path, bytes([200]) + bytes(3072), ".bin")
