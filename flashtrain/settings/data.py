"""The group `data`: where text comes from, how it becomes tokens, and how tokens become samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from flashtrain.data.text_files import UTF_8, check_encoding
from flashtrain.errors import UserError, at_least, between, one_of, unknown
from flashtrain.settings.options import (
    EncodingErrors,
    Source,
    SpecialTokens,
    TokenDtype,
    Tokenizer,
    TooLong,
    TrainOn,
    check_options,
    option,
)
from flashtrain.settings.training import no_options

# Sources that read what these settings name: elsewhere they would be passed over in silence.
READ_BY = {
    "path": ("files", "tokens", "chat"),
    "name": ("hub", "chat"),
    "mixture": ("mixture",),
    "validation_path": ("stdlib", "packages", "files", "hub", "tokens", "chat"),
}
# What a source of data=mixture may be, and the settings that it may have.
PARTS = ("files", "hub", "packages", "stdlib", "tokens")
KINDS_OF_A_PART: dict[str, type] = {
    "streaming": bool, "include_tests": bool, "end_of_text": int, "options": dict, "files": object,
    "include_ignored": bool,
}  # fmt: skip
SHARED = (
    "tokenizer",
    "vocab_size",
    "vocab",
    "merges",
    "files",
    "include_ignored",
    "special_tokens",
)
OF_A_PART = (
    "source", "weight", "path", "name", "config", "split", "text_column", "encoding",
    "encoding_errors", "dtype",
    *KINDS_OF_A_PART,
)  # fmt: skip


@dataclass
class LengthWeight:
    """How often an epoch reads documents; of several limits the longest that one reaches counts."""

    at_least: int = 1  # tokens of a document, its end_of_text included
    weight: float = 1.0  # times an epoch; 2.5: twice or, drawn by the seed, three times


@dataclass
class DataSettings:
    """Where text comes from, how it becomes tokens, and how tokens become samples (conf/data)."""

    # stdlib, packages, files, hub, tokens, chat, mixture, or a registered source.
    source: str = "stdlib"
    path: str | None = None  # the file or folder that data=files, tokens and chat read
    # Patterns, as in .gitignore, of a folder's files: '*.py' or ['src/**/*.py', '!tests/**']
    # (data=files, chat); null: all that are text; of data=chat .jsonl and .parquet.
    files: Any = None
    # Whether what .gitignore names, virtual environments and node_modules are read too.
    include_ignored: bool = False
    # A file or folder that is held out, in place of a part of the text.
    validation_path: str | None = None
    # The type of the numbers in .bin files without a header (data=tokens).
    dtype: str | None = option(None, TokenDtype)
    # The sources of data=mixture with their weights: {NAME: {path: ..., weight: 2}, ...}
    mixture: Any = None
    # The id between documents in files of tokens (data=tokens); null: the tokenizer's.
    end_of_text: int | None = None
    name: str | None = None  # the dataset of the hub that data=hub and chat read
    config: str | None = None  # the dataset's configuration, if it has several (data=hub, chat)
    # The dataset's split that is trained on (data=hub, chat, and folders of save_to_disk).
    split: str = "train"
    # The field of .jsonl lines, .parquet rows and hub datasets that holds the text.
    text_column: str = "text"
    encoding: str = UTF_8  # the encoding of text files: any of Python's
    # Bytes that are no text: strict stops and names their place, replace counts and replaces them.
    encoding_errors: str = option("strict", EncodingErrors)
    # How a text that spells a special token, such as <|im_end|>, is read: as letters, as that token
    # (tokens), or so in data=chat alone (chat). What a chat template writes is always tokens.
    special_tokens: str = option("letters", SpecialTokens)
    # Whether tokens are made while training and not written (data=files, hub); null: a token file
    # is written first; false (data=hub): a copy of the dataset is saved too.
    streaming: bool | None = None
    include_tests: bool = True  # whether data=stdlib and packages read the packages' own tests too
    # What makes tokens; or the folder of a Hugging Face tokenizer. bpe is trained on the text.
    tokenizer: str = option("bpe", Tokenizer, others=True)
    vocab_size: int = 50257  # tokens that bpe learns, or that data=tokens has without a tokenizer
    vocab: str | None = None  # a local vocab.json for data.tokenizer=gpt2; null: the hub's
    merges: str | None = None  # a local merges.txt for data.tokenizer=gpt2; null: the hub's
    # Begin documents, prompts and scored texts with the tokenizer's token for that, if it has one.
    begin_of_text: bool = True
    # Whether tokens see their own document alone: mask.documents=true by another name.
    document_mask: bool = False
    # Read longer documents more often: [{at_least: 32768, weight: 4}]; the others once.
    length_weights: list[LengthWeight] = field(default_factory=list)
    # Share of documents held out without a file for it; 1, in mode=evaluate: all.
    validation_fraction: float = 0.02
    # Held-out tokens of each validation; null: at most 524,288, and a tenth of the training's time.
    validation_tokens: int | None = None
    # Hold out the documents that a run of this context does; null: its own.
    split_context: int | None = None
    # Processes that build batches, a device; 0: the training's own; null: 2 on GPUs.
    workers: int | None = None
    # Where token files lie; null: FLASHTRAIN_CACHE, else the user's cache folder.
    cache_dir: str | None = None
    # The tokens of a conversation whose loss counts (data=chat).
    train_on: str = option("assistant", TrainOn)
    # Refuse answers that the template leaves out, learn none of weight 0 (data=chat).
    check_answers: bool = True
    # A file with a Jinja template in place of the tokenizer's own (data=chat).
    chat_template: str | None = None
    # What is done with a conversation longer than the context (data=chat).
    too_long: str = option("cut", TooLong)
    # The share of rows that may be broken and are left out (data=chat); 0 refuses the first.
    skip_broken: float = 0.0
    # Options of a dataset, or of a registered source: +data.options.NAME=VALUE.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def first_words(self) -> str:
        """The prompt to use if none is given, which resembles the beginning of
        a training document."""
        if self.tokenizer == "none":
            return "0"  # a token's id
        return {"stdlib": "import ", "packages": "def __init__(self", "chat": "Hello!"}.get(
            self.source, "The "
        )

    def check(self) -> None:
        if self.source == "files" and not self.path:
            raise UserError(
                "data=files needs data.path=..., a file or folder of text, .jsonl or .parquet."
            )
        if self.source == "hub" and not self.name:
            raise UserError(
                "data=hub needs data.name=..., a dataset of the hub such as roneneldan/TinyStories."
            )
        if self.source == "tokens" and not self.path:
            raise UserError(
                "data=tokens needs data.path=..., a .npy or .bin file of tokens, "
                "or a folder of them."
            )
        if self.source == "mixture":
            self._check_mixture()
        at_least("data.end_of_text", self.end_of_text, 0)
        self._check_tokenizer()
        for one in self.length_weights:
            at_least("data.length_weights.at_least", one.at_least, 1)
            between("data.length_weights.weight", one.weight, 0, 1e6)
        if self.length_weights and (self.streaming or self.source == "chat"):
            streams = " data.streaming=true" if self.streaming else ""
            raise UserError(
                "data.length_weights needs whole documents of lengths that are known before the "
                f"training, which data={self.source}{streams} has not. Remove data.length_weights."
            )
        between("data.skip_broken", self.skip_broken, 0.0, 1.0, include_high=False)
        check_encoding(self.encoding)
        if (self.vocab is None) != (self.merges is None):
            raise UserError(
                "data.vocab and data.merges belong together. "
                "Set both, or neither to use the hub's files."
            )
        if self.vocab is not None and self.tokenizer != "gpt2":
            raise UserError(
                f"data.vocab={self.vocab} needs data.tokenizer=gpt2, not {self.tokenizer}. "
                "Remove data.vocab and data.merges, or set data.tokenizer=gpt2."
            )
        for name, sources in READ_BY.items():
            given = getattr(self, name)
            if given is not None and self.source in get_args(Source) and self.source not in sources:
                by = " or ".join(f"data={source}" for source in sources)
                line = f"data.{name}={given} is used by {by}, and this is data={self.source}"
                raise UserError(f"{line}. Add data={sources[0]}, or remove data.{name}.")
        no_options(
            "data", self.source, self.options, [one for one in get_args(Source) if one != "hub"]
        )
        if self.validation_fraction != 1:
            between("data.validation_fraction", self.validation_fraction, 0.0, 0.5)
        at_least("data.validation_tokens", self.validation_tokens, 1)
        at_least("data.split_context", self.split_context, 1)
        at_least("data.workers", self.workers, 0)

    def parts(self) -> dict[str, tuple[DataSettings, float]]:
        """Return the settings and the weight of each source of data.mixture, by name. Raises
        UserError for a wrong setting of a source."""
        found = {}
        for name, given in (self.mixture or {}).items():
            where = f"data.mixture.{name}"
            if not isinstance(given, dict):
                raise UserError(
                    f"{where}={given} must be the settings of a source: {{path: FOLDER, weight: "
                    f"2}}."
                )
            odd = [key for key in given if key not in OF_A_PART]
            if odd:
                raise unknown(f"setting of {where}", str(odd[0]), OF_A_PART)
            own = {key: value for key, value in given.items() if key != "weight"}
            source = own.pop(
                "source", "files" if "path" in own else "hub" if "name" in own else "stdlib"
            )
            weight = given.get("weight", 1.0)
            if (
                isinstance(weight, bool)
                or not isinstance(weight, (int, float))
                or not 0 < weight < float("inf")
            ):
                raise UserError(f"{where}.weight={weight} must be a number above 0.")
            for key, value in own.items():
                if not isinstance(value, KINDS_OF_A_PART.get(key, str)):
                    raise UserError(
                        f"{where}.{key}={value} must be of type "
                        f"{KINDS_OF_A_PART.get(key, str).__name__}."
                    )
            shared = {key: getattr(self, key) for key in SHARED}
            found[name] = (DataSettings(**{**shared, **own, "source": source}), float(weight))
        return found

    def _check_mixture(self) -> None:
        if not isinstance(self.mixture, dict) or not self.mixture:
            raise UserError(
                "data=mixture needs data.mixture={NAME: {path: FOLDER, weight: 2}, OTHER: {path: "
                "...}}."
            )
        for name, (part, _) in self.parts().items():
            try:
                one_of("source", part.source, PARTS)
                check_options("data", part)
                part.check()
            except UserError as error:
                raise UserError(f"settings of data.mixture.{name}: {error}") from error

    def _check_tokenizer(self) -> None:
        if (
            self.tokenizer not in get_args(Tokenizer)
            and not Path(self.tokenizer).expanduser().is_dir()
        ):
            listed = (*get_args(Tokenizer), "a folder with tokenizer.json")
            raise unknown("data.tokenizer", self.tokenizer, get_args(Tokenizer), listed=listed)
        if self.tokenizer == "none" and self.source != "tokens":
            raise UserError(
                f"data.tokenizer=none needs data=tokens, and data={self.source} is text. "
                "Set data.tokenizer=gpt2, bytes, bpe or a folder with tokenizer.json."
            )
        if self.streaming and self.tokenizer == "bpe":
            raise UserError(
                "data.streaming=true tokenizes during training, and data.tokenizer=bpe is trained "
                "before. Set data.tokenizer=gpt2, bytes or a folder with tokenizer.json."
            )
        if self.source != "tokens":
            at_least("data.vocab_size", self.vocab_size, 257)
        elif self.tokenizer == "bpe":
            raise UserError(
                "data.tokenizer=bpe is trained on text, and data=tokens has none. "
                "Set data.tokenizer to the tokenizer that made the tokens, or to none."
            )
        elif self.tokenizer == "none" and self.vocab_size < 1:
            raise UserError(
                "data=tokens needs the vocabulary of its tokens. Set data.tokenizer=gpt2, bytes or "
                "a folder with tokenizer.json, or data.vocab_size=NUMBER where there is none."
            )
