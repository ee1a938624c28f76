"""The tokenizer of any Hugging Face folder: its ids, its end of text, kept in a run and
read back by transformers."""

from __future__ import annotations

import json

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from flashtrain.data import huggingface_tokenizer as module
from flashtrain.data.token_cache import open_or_build
from flashtrain.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    TokenizerSpec,
    huggingface_tokenizer,
    load_tokenizer,
)
from flashtrain.errors import UserError
from flashtrain.integrations import save_tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = ["hello world hello token", "the end </s> of it", "gr\u00fc\u00df dich", ""]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of Llama's kind, that would add a first token, cut and pad: metaspaces,
    unknown bytes, "</s>"."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["hello world", "the end of it", "a token or two"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": {"content": "</s>"},
        "auto_map": {"x": "code.py"},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def test_ids_are_the_texts_own_without_special_tokens_cuts_or_padding(folder):
    tokenizer = huggingface_tokenizer(folder)
    assert tokenizer.end_of_text == 2
    assert (
        tokenizer.vocab_size == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    )
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])).strip() == TEXTS[0]
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert [found.tolist() for found in tokenizer.encode_batch(TEXTS)] == ids
    assert not {1, 2} & {one for each in ids for one in each}
    assert len(ids[0]) > 3


def test_a_run_keeps_it_and_an_export_gives_transformers_the_same_ids(folder, tmp_path):
    tokenizer = huggingface_tokenizer(folder)
    tokenizer.save(tmp_path / "run")
    kept = load_tokenizer(tmp_path / "run")
    assert (kept.fingerprint(), kept.end_of_text) == (tokenizer.fingerprint(), 2)
    assert huggingface_tokenizer(tmp_path / "run").fingerprint() == tokenizer.fingerprint()
    assert (
        save_tokenizer(kept, tmp_path / "export", context=64) == "AutoTokenizer reads its tokenizer"
    )
    for place in ("run", "export"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / place)
        assert theirs(TEXTS[0], add_special_tokens=False)["input_ids"] == tokenizer.encode(TEXTS[0])
        assert theirs.eos_token == "</s>"
        assert theirs.chat_template == "{{ messages }}"
    assert theirs.model_max_length == 64
    assert "auto_map" not in (tmp_path / "export" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "<s>"}}, 1),
        ({"special_tokens_map.json": {"eos_token": {"content": "<s>"}}}, 1),
        ({"config.json": {"eos_token_id": [1, 2]}}, 1),
        ({}, 2),
    ],
)
def test_its_end_of_text_is_what_its_settings_or_the_model_beside_say(folder, files, end):
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert huggingface_tokenizer(folder).end_of_text == end


def test_what_flashtrain_saved_is_read_as_it_was(tmp_path):
    ByteTokenizer().save(tmp_path / "bytes")
    assert isinstance(huggingface_tokenizer(tmp_path / "bytes"), ByteTokenizer)
    BPETokenizer.train(["some text"], 260).save(tmp_path / "bpe")
    assert isinstance(huggingface_tokenizer(tmp_path / "bpe"), BPETokenizer)


@pytest.mark.parametrize("change", ["tokens", "chat template", "end"])
def test_what_was_changed_after_flashtrain_saved_it_is_read_as_autotokenizer_reads_it(
    change, tmp_path
):
    save_tokenizer(BPETokenizer.train(TEXTS, 270), tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    if change == "chat template":
        theirs.chat_template = "{{ messages }}"
    else:
        theirs.add_special_tokens(
            {"eos_token": "<|user|>"}
            if change == "end"
            else {"additional_special_tokens": ["<|user|>"]}
        )
    theirs.save_pretrained(tmp_path / "changed")
    assert '"kind": "bpe"' in (tmp_path / "changed" / "tokenizer_config.json").read_text()
    ours = huggingface_tokenizer(tmp_path / "changed")
    text = "hello <|user|> world"
    assert ours.with_special_tokens().encode(text) == theirs(text)["input_ids"]
    assert ours.end_of_text == theirs.eos_token_id
    assert ours.config.get("chat_template") == theirs.chat_template


def test_a_folder_without_tokenizer_json_is_made_by_transformers(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = {"tokenizer_class": "BertTokenizer", "sep_token": "[SEP]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = huggingface_tokenizer(tmp_path)
    assert tokenizer.encode("Hello world") == [5, 6]
    assert tokenizer.end_of_text == 3


def test_token_caches_follow_the_folders_content_and_not_its_place(folder, list_source, tmp_path):
    source = list_source(["hello world"])
    first = open_or_build(source, TokenizerSpec(str(folder)))
    assert first.tokenizer.encode("hello") == huggingface_tokenizer(folder).encode("hello")
    folder.rename(tmp_path / "moved")
    assert open_or_build(source, TokenizerSpec(str(tmp_path / "moved"))).folder == first.folder
    (tmp_path / "moved" / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert open_or_build(source, TokenizerSpec(str(tmp_path / "moved"))).folder != first.folder


def test_mistakes_are_refused_and_no_code_runs(folder, monkeypatch):
    def fails(message):
        with pytest.raises(UserError, match=message):
            huggingface_tokenizer(folder)

    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    fails(r"has no token <end>: correct eos_token in its tokenizer_config\.json")
    monkeypatch.setattr(module, "USUAL_ENDS", ())
    (folder / "tokenizer_config.json").unlink()
    fails("eos_token")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    fails("cannot be read")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["a.X", null]}}'
    )
    (folder / "a.py").write_text("raise SystemExit('ran')")
    fails("contains custom code")
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    fails("no tokenizer in .*: expected tokenizer.json")
