"""Files of tokens that somebody else made: read through a map, checked before training."""

from __future__ import annotations

import numpy as np
import pytest

from flashtrain.command.compose import compose_settings
from flashtrain.data import token_files
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.token_files import TokenFiles
from flashtrain.data.token_ids import TokenIds
from flashtrain.data.tokenizers import TokenizerSpec, load_tokenizer
from flashtrain.errors import UserError
from flashtrain.run.machine import apply_demo
from flashtrain.settings.command_line import CommandLine

IDS = np.arange(1, 201) % 50
NO_TOKENIZER = TokenizerSpec("none", vocab_size=50)


def opened(path, *, tokenizer=NO_TOKENIZER, **options):
    return TokenFiles(path, **options).open_tokens(tokenizer, None)


def llm_c(path, tokens, dtype="uint16", magic=20240520, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_npy_and_bin_files_of_every_type(tmp_path, dtype):
    np.save(tmp_path / "a.npy", IDS.astype(dtype))
    IDS.astype(dtype).tofile(tmp_path / "a.bin")  # as nanoGPT writes it
    for found in (opened(tmp_path / "a.npy"), opened(tmp_path / "a.bin", dtype=dtype)):
        assert found.tokens[0:200].tolist() == IDS.tolist()
        assert found.offsets.tolist() == [0, 200]


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_bin_files_of_llm_c_say_themselves_what_they_hold(tmp_path, magic, dtype):
    path = llm_c(tmp_path / "a.bin", IDS, dtype, magic)
    assert opened(path).tokens[0:200].tolist() == IDS.tolist()


def test_documents_end_at_the_end_of_text_and_where_a_file_does(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 0, 3, 0, 4], "uint16"))
    np.save(tmp_path / "b.npy", np.array([0, 5, 6, 0], "int64"))
    assert opened(tmp_path, end_of_text=0).offsets.tolist() == [0, 3, 5, 6, 7, 10]
    assert opened(tmp_path).offsets.tolist() == [0, 6, 10]  # each file one document


def test_several_files_are_one_stream_of_packed_rows(tmp_path):
    np.save(tmp_path / "a.npy", IDS[:77].astype("uint16"))
    (tmp_path / "sub").mkdir()
    llm_c(tmp_path / "sub" / "b.bin", IDS[77:])
    (tmp_path / ".hidden.npy").write_bytes(b"")
    data = TextDataModule(
        TokenFiles(tmp_path), NO_TOKENIZER, 32, 2, validation_fraction=0, total_steps=3
    )
    data.setup()
    rows = data._samples(data.split.training)
    assert rows[list(range(len(rows)))]["tokens"].flatten().tolist() == IDS[: 6 * 32].tolist()
    assert data.train_tokens == 200


def test_files_named_for_validation_are_held_out_else_the_last_tokens(tmp_path):
    np.save(tmp_path / "train.npy", IDS[:150].astype("uint16"))
    np.save(tmp_path / "val.npy", IDS[150:].astype("uint16"))
    for path, counts in ((tmp_path, (150, 50)), (tmp_path / "train.npy", (120, 30))):
        data = TextDataModule(TokenFiles(path), NO_TOKENIZER, 16, 2, validation_fraction=0.2)
        assert (data.train_tokens, data.validation_tokens) == counts


def test_a_named_tokenizer_says_vocabulary_and_end_of_text(tmp_path):
    np.save(tmp_path / "a.npy", np.array([104, 105, 256, 104], "uint16"))
    found = opened(tmp_path, tokenizer=TokenizerSpec("bytes"))
    assert found.offsets.tolist() == [0, 3, 4]
    assert found.tokenizer.decode([104, 105]) == "hi"


def test_tokens_without_a_tokenizer_are_written_as_their_ids(tmp_path):
    ids = TokenIds(50, 7)
    assert ids.encode(" 12 7 ") == [12, 7]
    assert ids.decode([12, 7]) == "12 7"
    ids.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.vocab_size, again.end_of_text, again.fingerprint()) == (50, 7, ids.fingerprint())
    for text in ("The", "50", "-1", "1.5", "9" * 5000):
        with pytest.raises(UserError, match=r"no tokenizer: expected ids below 50"):
            ids.encode(text)


def test_the_documents_of_a_large_file_are_noted_and_looked_at_anew_when_it_changes(
    tmp_path, monkeypatch, cache_home
):
    monkeypatch.setattr(token_files, "TOKENS_CHUNK", 7)
    path = tmp_path / "a.npy"
    np.save(path, IDS.astype("uint16"))
    first = opened(path, end_of_text=0).offsets.tolist()
    (noted,) = (cache_home / "token-files").iterdir()
    assert np.load(noted)[:2].tolist() == [0, 49]
    monkeypatch.setattr(token_files.TokenFile, "mapped", None)
    assert opened(path, end_of_text=0).offsets.tolist() == first
    monkeypatch.undo()
    np.save(path, np.zeros(3, "uint16"))
    assert opened(path, end_of_text=0).offsets.tolist() == [0, 1, 2, 3]


def fails(path, message, **options):
    with pytest.raises(UserError, match=message) as told:
        opened(path, **options)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        (
            "beyond",
            np.array([1, 50, 2], "uint16"),
            r"token 50, expected 0 to 49\. .*data\.tokenizer",
        ),
        ("below", np.array([1, -1, 2], "int32"), "holds token -1"),
        ("float", np.zeros(3), r"holds float64 of shape \(3,\), expected one dimension of uint16"),
        ("table", np.zeros((3, 3), "uint16"), r"of shape \(3, 3\)"),
        ("swapped", IDS.astype(">u2"), "holds >u2|holds uint16"),
        ("empty", np.zeros(0, "uint16"), "contains no tokens"),
    ],
)
def test_arrays_that_are_no_tokens_of_the_vocabulary_are_one_line(tmp_path, name, tokens, message):
    np.save(tmp_path / f"{name}.npy", tokens)
    fails(tmp_path / f"{name}.npy", message)


def test_files_of_another_form_are_one_line(tmp_path):
    np.save(tmp_path / "cut.npy", IDS.astype("uint16"))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-1])
    fails(tmp_path / "cut.npy", r"cannot be read as \.npy")
    (tmp_path / "plain.bin").write_bytes(b"12345")
    fails(tmp_path / "plain.bin", r"data\.dtype=uint16 .* or uint32")
    fails(tmp_path / "plain.bin", r"5 bytes.* data\.dtype=uint16", dtype="uint16")
    fails(llm_c(tmp_path / "short.bin", IDS, count=500), r"llm\.c header.*500 tokens")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("text")
    fails(tmp_path / "folder", r"data\.path=.* \.npy or \.bin")


def test_what_needs_documents_or_text_reports_it(tmp_path):
    np.save(tmp_path / "a.npy", IDS.astype("uint16"))
    with pytest.raises(UserError, match=r"document_mask=true .*data\.end_of_text=ID"):
        TextDataModule(TokenFiles(tmp_path), NO_TOKENIZER, 16, 2, document_mask=True).setup()
    with pytest.raises(UserError, match=r"length_weights needs documents.*end_of_text=ID"):
        TextDataModule(TokenFiles(tmp_path), NO_TOKENIZER, 16, 2, length_weights=[(9, 2)]).setup()
    with pytest.raises(UserError, match=r"data\.end_of_text=60 .*50"):
        opened(tmp_path, end_of_text=60)
    with pytest.raises(UserError, match="data=files"):
        MaskedTextDataModule(TokenFiles(tmp_path), "bytes")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"data=tokens needs data\.path="),
        (["data.path=x"], r"data=tokens needs the vocabulary .* Set data\.tokenizer=gpt2"),
        (["data.path=x", "data.tokenizer=bpe"], r"data\.tokenizer=bpe is trained on text"),
        (["data.path=x", "data.vocab_size=50", "data.dtype=int8"], r"unknown data\.dtype 'int8'"),
        (
            ["data.path=x", "data.tokenizer=bytes", "data.end_of_text=-1"],
            r"data\.end_of_text=-1 must be at least 0",
        ),
        (
            ["data.path=x", "data.tokenizer=gtp2"],
            r"unknown data\.tokenizer 'gtp2'\. Did you mean 'gpt2'",
        ),
        (["data=stdlib", "data.tokenizer=none"], r"data\.tokenizer=none needs data=tokens"),
    ],
)
def test_settings_are_checked_before_a_file_is(words, message):
    data = [] if words[:1] == ["data=stdlib"] else ["data=tokens"]
    with pytest.raises(UserError, match=message):
        compose_settings(["recipe=gpt2", *data, *words])


def test_a_demo_keeps_the_files_own_tokens():
    words = ["recipe=gpt2", "data=tokens", "data.path=x", "data.vocab_size=65"]
    demo = apply_demo(compose_settings(words), CommandLine(words).by_name).data
    assert (demo.tokenizer, demo.vocab_size, demo.first_words) == ("none", 65, "0")
