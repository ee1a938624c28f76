"""Builds what the settings group `data` names: sources of text or tokens, and the tokenizer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from flashtrain.data.hub_source import HubSource, saved_folder
from flashtrain.data.packages import PackagesSource
from flashtrain.data.sources import StandardLibrarySource, TextSource, TokenSource, held_out
from flashtrain.data.text_files import FilesSource
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, huggingface_tokenizer
from flashtrain.errors import UserError
from flashtrain.registry import component, register
from flashtrain.settings import options
from flashtrain.settings.data import DataSettings
from flashtrain.settings.training import TrainerSettings
from flashtrain.training.validation import held_out_samples

# "huggingface": as many as its model has.
VOCABULARY = {"bytes": 257, "gpt2": 50257, "huggingface": 0}


@register("source", "stdlib")
def _standard_library(settings: DataSettings) -> TextSource:
    return StandardLibrarySource(include_tests=settings.include_tests)


@register("source", "packages")
def _packages(settings: DataSettings) -> TextSource:
    return PackagesSource(include_tests=settings.include_tests)


@register("source", "files")
def _files(settings: DataSettings) -> TextSource:
    path = str(settings.path)
    if saved_folder(path, settings.split) is not None:
        return HubSource(path, settings.split, settings.text_column)
    if settings.split != DataSettings.split:
        raise UserError(
            f"data.split={settings.split} is for datasets that save_to_disk wrote, "
            f"and {path} is none. Remove data.split."
        )
    return FilesSource(path, **_of_files(settings))


def _of_files(settings: DataSettings) -> dict[str, Any]:
    names = ("text_column", "encoding", "encoding_errors", "include_ignored")
    return {"patterns": settings.files, **{name: getattr(settings, name) for name in names}}


def _of_dataset(settings: DataSettings) -> dict[str, Any]:
    shared = {
        name: getattr(settings, name) for name in ("split", "text_column", "config", "options")
    }
    return {**shared, "streaming": settings.streaming is not False}


@register("source", "tokens")
def _token_files(settings: DataSettings) -> TokenSource:
    from flashtrain.data.token_files import TokenFiles

    return TokenFiles(str(settings.path), dtype=settings.dtype, end_of_text=settings.end_of_text)


@register("source", "mixture")
def _mixture(settings: DataSettings) -> TokenSource:
    from flashtrain.data.mixture import MixtureSource

    parts = settings.parts().items()
    return MixtureSource({name: (make_source(part), weight) for name, (part, weight) in parts})


@register("source", "hub")
def _hub(settings: DataSettings) -> TextSource:
    return HubSource(str(settings.name), **_of_dataset(settings))


@register("source", "chat")
def _chat(settings: DataSettings) -> TextSource:
    from flashtrain.data.chat_source import ChatDataset, ChatFiles

    if (settings.path is None) == (settings.name is None):
        raise UserError(
            "data=chat needs data.path=..., a .jsonl or .parquet file, a folder of such files or "
            "of save_to_disk, or data.name=..., a dataset of the hub."
        )
    if settings.path is not None and saved_folder(settings.path, settings.split) is None:
        return ChatFiles(settings.path, **_of_files(settings))
    return ChatDataset(
        str(settings.name or Path(str(settings.path)).expanduser()), **_of_dataset(settings)
    )


def make_source(data: DataSettings) -> TextSource | TokenSource:
    """Build the source of text or tokens that `data` names."""
    source = component("source", data.source)(data)
    source.special_tokens = data.special_tokens in ("tokens", data.source)
    return source


def make_sources(data: DataSettings) -> tuple[Any, Any]:
    """Build (the source to train on, the source of data.validation_path); the second is None
    without that setting, and documents of the first are then held out.

    With data.validation_fraction=1 nothing is trained on: the first is then the source to score,
    the second None.
    """
    source, validation = make_source(data), None
    if data.validation_path is not None:
        kind = data.source if data.source in ("chat", "tokens") else "files"
        named = make_source(replace(data, source=kind, path=data.validation_path, name=None))
        validation = held_out(named) or named
    if data.validation_fraction != 1:
        return source, validation
    return validation or held_out(source) or source, None


def make_tokenizer_spec(
    data: DataSettings, model_path: str | None = None
) -> TokenizerSpec | Tokenizer:
    """Return the TokenizerSpec of data.tokenizer, from which the tokenizer is loaded later; for
    data.tokenizer=huggingface the tokenizer itself.

    Args:
        data: the group of settings.
        model_path: model.path, the folder or name of a model whose tokenizer
            data.tokenizer=huggingface means.
    """
    if data.tokenizer == "huggingface":
        from flashtrain.integrations.huggingface_folder import tokenizer_of

        return tokenizer_of(model_path, begin_of_text=data.begin_of_text)
    return TokenizerSpec(
        data.tokenizer,
        data.vocab_size,
        vocab=data.vocab,
        merges=data.merges,
        begin_of_text=data.begin_of_text,
    )


def vocabulary_of(data: DataSettings) -> int:
    """Return the vocabulary size of data.tokenizer, as far as it is known
    before any text is read."""
    if data.tokenizer in VOCABULARY:
        return VOCABULARY[data.tokenizer]
    if data.tokenizer in get_args(options.Tokenizer):
        return data.vocab_size
    return huggingface_tokenizer(data.tokenizer).vocab_size


def reading_options(
    data: DataSettings, trainer: TrainerSettings, *, requested: int | None, step: int, most: int
) -> dict[str, Any]:
    """Return keyword arguments that TextDataModule and MaskedTextDataModule have in common.

    Args:
        data, trainer: the groups of settings.
        requested: held-out samples of each validation, if a setting gives their number.
        step: samples of an optimizer step.
        most: upper bound of the samples of a validation if `requested` is None.
    """
    whole, every = requested is None and data.validation_fraction == 1, trainer.validate_every
    return {
        "total_steps": trainer.steps,
        "validation_fraction": data.validation_fraction,
        "validation_samples": sys.maxsize
        if whole
        else held_out_samples(requested, every, step, maximum=most),
        "length_weights": [(one.at_least, one.weight) for one in data.length_weights],
        "cache_dir": data.cache_dir,
    }


def loader_workers(data: DataSettings, kind: str) -> int:
    """Return the number of processes that read the data: data.workers, or two where a GPU
    must not wait for them."""
    if data.workers is not None:
        return data.workers
    return 2 if kind == "cuda" else 0
