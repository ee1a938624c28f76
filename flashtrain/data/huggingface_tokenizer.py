"""Load the tokenizer of a Hugging Face folder, from tokenizer.json or by transformers,
without running its code."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flashtrain.data.bpe import END_OF_TEXT
from flashtrain.data.library_tokenizer import (
    CONFIG,
    FILE,
    TAKEN_AS_IT_IS,
    LibraryTokenizer,
    read_if_there,
    read_tokenizer,
)
from flashtrain.errors import UserError, first_line

MAP, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
OTHER_FILES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
DECIDING = (FILE, CONFIG, MAP, "added_tokens.json", "config.json", *OTHER_FILES)
USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")  # if no file of the folder names one


class HuggingFaceTokenizer(LibraryTokenizer):
    """The tokenizer of a Hugging Face folder, made by `load`.

    Its end_of_text is the folder's eos_token, else its sep_token, else the
    eos_token_id in config.json.
    """

    kind, name = "huggingface", "a Hugging Face tokenizer"

    def __init__(self, library: Tokenizer, end_of_text: int, config: dict[str, Any]) -> None:
        super().__init__(library, end_of_text)
        self.begin_of_text = _put_before(library)  # what AutoTokenizer puts before a text
        self.config = {**config, "tokenizer_class": TAKEN_AS_IT_IS["tokenizer_class"]}
        self.config.pop("auto_map", None)  # names code in the folder
        self.config["eos_token"] = library.id_to_token(end_of_text)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> HuggingFaceTokenizer:
        """Read a folder. Raises UserError if its tokenizer is missing, damaged, or
        without an end of text."""
        folder = Path(folder).expanduser()
        config = {**read_if_there(folder / MAP), **read_if_there(folder / CONFIG)}
        if (folder / TEMPLATE).is_file():
            config["chat_template"] = (folder / TEMPLATE).read_text(encoding="utf-8")
        if (folder / FILE).is_file():
            tokenizer = read_tokenizer(folder / FILE)
        elif config or any((folder / name).is_file() for name in OTHER_FILES):
            tokenizer = _made_by_transformers(folder)
        else:
            raise UserError(f"no tokenizer in {folder}: expected {FILE} or {CONFIG}.")
        return cls(tokenizer, _end_of_text(folder, tokenizer, config), config)

    def without_begin(self) -> HuggingFaceTokenizer:
        """Return a copy without tokens put before a text. If it is saved, AutoTokenizer
        puts none there either."""
        library = self.library_form()
        library.post_processor = None
        return HuggingFaceTokenizer(library, self.end_of_text, self.config)

    def fingerprint(self) -> str:
        begin = f"{self.begin_of_text} " if self.begin_of_text else ""
        return hashlib.sha256(
            f"{begin}{self.end_of_text} {self._library.to_str()}".encode()
        ).hexdigest()


def as_huggingface(tokenizer: Any) -> Any:
    """Return a tokenizer of flashtrain as a Hugging Face one, which may have a chat template; one
    that the library does not run is returned as it is."""
    if isinstance(tokenizer, HuggingFaceTokenizer) or not isinstance(tokenizer, LibraryTokenizer):
        return tokenizer
    return HuggingFaceTokenizer(tokenizer.library_form(), tokenizer.end_of_text, tokenizer.config)


def folder_version(folder: str | os.PathLike[str]) -> str:
    """Return a hash of the files in a folder that decide its tokenizer's ids, without
    loading the tokenizer."""
    digest = hashlib.sha256()
    for name in DECIDING:
        path = Path(folder).expanduser() / name
        if path.is_file():
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _made_by_transformers(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:  # most of which do not name the folder
        raise UserError(
            f"no tokenizer.json in {folder}, and transformers cannot make one of its files: "
            f"{first_line(error)}"
        ) from error
    return Tokenizer.from_str(made.backend_tokenizer.to_str())


def _put_before(tokenizer: Tokenizer) -> list[int]:
    # AutoTokenizer, too, adds what tokenizer.json names, whatever add_bos_token is.
    found = tokenizer.encode("a")
    own = [not added for added in found.special_tokens_mask]
    return found.ids[: own.index(True)] if any(own) else []


def _end_of_text(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> int:
    for name in ("eos_token", "sep_token"):
        given = config.get(name)
        token = given.get("content") if isinstance(given, dict) else given
        if isinstance(token, str):
            number = tokenizer.token_to_id(token)
            if number is None:
                raise UserError(
                    f"the tokenizer in {folder} has no token {token}: "
                    f"correct {name} in its {CONFIG}."
                )
            return number
    number = read_if_there(folder / "config.json").get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int) and tokenizer.id_to_token(number) is not None:
        return number
    usual = (tokenizer.token_to_id(token) for token in USUAL_ENDS)
    found = next((number for number in usual if number is not None), None)
    if found is None:
        raise UserError(
            f"the tokenizer in {folder} names no end-of-text token, which ends every document. Set "
            '"eos_token" in '
            f"{CONFIG}."
        )
    return found
