"""The tokenizer of any Hugging Face folder: tokenizer.json, or what transformers makes one of. No code of it runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from flashtrain.data.bpe import END_OF_TEXT, rust_threads
from flashtrain.data.tokenizer_files import CONFIG, FILE, MARK, read_tokenizer
from flashtrain.errors import UserError, first_line
from flashtrain.files.disk import write_atomically
from flashtrain.files.json_files import read_json

MAP, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
OTHER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
DECIDING = (FILE, CONFIG, MAP, "added_tokens.json", "config.json", *OTHER_FILES)
USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")  # where no file of the folder says which


class HuggingFaceTokenizer:
    """A tokenizer as its folder has it. It adds no special token to a text, and one that a text spells is text.

    begin_of_text: the ids that transformers' AutoTokenizer puts before a text (tokenizers.as_document does).
    end_of_text: the eos_token of the folder's settings, else its sep_token, else that of the model beside.
    config: what tokenizer_config.json says, a chat template included. Made by `load`.
    """

    kind = "huggingface"

    def __init__(self, tokenizer: RustTokenizer, end_of_text: int, config: dict[str, Any]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.begin_of_text = _put_before(tokenizer)
        self.end_of_text = end_of_text
        # The class that takes tokenizer.json as it is: others of transformers build parts of it anew.
        self.config = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
        self.config.pop("auto_map", None)  # names code in the folder
        self.config["eos_token"] = tokenizer.id_to_token(end_of_text)
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> HuggingFaceTokenizer:
        """Raises UserError: no tokenizer there, a damaged one, one without an end of text."""
        folder = Path(folder).expanduser()
        config = {**_read(folder / MAP), **_read(folder / CONFIG)}
        if (folder / TEMPLATE).is_file():
            config["chat_template"] = (folder / TEMPLATE).read_text(encoding="utf-8")
        if (folder / FILE).is_file():
            tokenizer = read_tokenizer(folder / FILE)
        elif config or any((folder / name).is_file() for name in OTHER_FILES):
            tokenizer = _made_by_transformers(folder)
        else:
            raise UserError(f"no tokenizer in {folder}: it has no {FILE} and no {CONFIG}.")
        return cls(tokenizer, _end_of_text(folder, tokenizer, config), config)

    def without_begin(self) -> HuggingFaceTokenizer:
        """A copy that puts nothing around a text; nor does AutoTokenizer where it is saved."""
        library = self.library_form()
        library.post_processor = None
        return HuggingFaceTokenizer(library, self.end_of_text, self.config)

    def library_form(self) -> RustTokenizer:
        """A copy of the Hugging Face library's tokenizer."""
        return RustTokenizer.from_str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with rust_threads():
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in found]

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """special: with the special tokens' names."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=not special)

    def describe(self) -> str:
        return f"a Hugging Face tokenizer ({self.vocab_size:,} tokens)"

    def fingerprint(self) -> str:
        begin = f"{self.begin_of_text} " if self.begin_of_text else ""
        return hashlib.sha256(f"{begin}{self.end_of_text} {self._tokenizer.to_str()}".encode()).hexdigest()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Also loads as transformers.AutoTokenizer.from_pretrained(folder)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, self._tokenizer.to_str())
        write_atomically(folder / CONFIG, json.dumps({**self.config, MARK: {"kind": self.kind}}, indent=1))


def folder_version(folder: str | os.PathLike[str]) -> str:
    """A hash of what decides the ids, known without reading the tokenizer."""
    digest = hashlib.sha256()
    for name in DECIDING:
        path = Path(folder).expanduser() / name
        if path.is_file():
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _made_by_transformers(folder: Path) -> RustTokenizer:
    """The tokenizer of a folder without tokenizer.json."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"{folder} has no {FILE}, and making it of its other files needs transformers: pip install transformers"
        ) from error
    try:
        made = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return RustTokenizer.from_str(made.backend_tokenizer.to_str())
    except Exception as error:
        raise UserError(
            f"no {FILE} in {folder}, and transformers makes no tokenizer of its other files: {first_line(error)}."
        ) from error


def _put_before(tokenizer: RustTokenizer) -> list[int]:
    """AutoTokenizer takes what stands around a text from tokenizer.json alone, whatever add_bos_token says."""
    found = tokenizer.encode("a")
    own = [not added for added in found.special_tokens_mask]
    return found.ids[: own.index(True)] if any(own) else []


def _end_of_text(folder: Path, tokenizer: RustTokenizer, config: dict[str, Any]) -> int:
    for name in ("eos_token", "sep_token"):
        given = config.get(name)
        token = given.get("content") if isinstance(given, dict) else given
        if isinstance(token, str):
            number = tokenizer.token_to_id(token)
            if number is None:
                raise UserError(f"the tokenizer in {folder} has no token {token}, which its {CONFIG} calls {name}.")
            return number
    number = _read(folder / "config.json").get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int) and tokenizer.id_to_token(number) is not None:
        return number
    usual = (tokenizer.token_to_id(token) for token in USUAL_ENDS)
    found = next((number for number in usual if number is not None), None)
    if found is None:
        raise UserError(
            f"the tokenizer in {folder} names no end of text, which closes every document: say it in {CONFIG}, as "
            '"eos_token".'
        )
    return found
