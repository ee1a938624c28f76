"""flashtrain's own components, registered under the names that conf/ uses, and how Settings reach them.

This is where settings end: everything built here takes plain arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from flashtrain.data.hub_source import HubSource, saved_folder
from flashtrain.data.sources import StandardLibrarySource, TextSource, TokenSource, held_out
from flashtrain.data.text_files import FilesSource
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, huggingface_tokenizer
from flashtrain.errors import UserError
from flashtrain.models.generation import MaskMaker, row_mask
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.gpt2_config import FAMILIES, GPT2Config
from flashtrain.models.trainable import Trainable, as_trainable, check_contract
from flashtrain.registry import component, register
from flashtrain.settings import options
from flashtrain.settings.data import DataSettings
from flashtrain.settings.settings import Settings
from flashtrain.settings.training import OptimizerSettings, ScheduleSettings
from flashtrain.training.hardware import VOCABULARY, Hardware
from flashtrain.training.optimizers import HALF, MasterWeights, adamw, adamw_8bit, lamb, muon
from flashtrain.training.steps import SCHEDULES
from flashtrain_kernels import Mask, masks

if TYPE_CHECKING:
    from flashtrain.tasks.language.settings import MaskSettings, ModelSettings


def decoder_config(family: str, settings: ModelSettings, *, vocab_size: int, context: int) -> GPT2Config:
    """The decoder that conf/model asks for, of the family "gpt2" or "modern"."""
    return GPT2Config.of_size(
        settings.size,
        family,
        vocab_size=vocab_size,
        context=context,
        vocab_rows=settings.vocab_rows,
        positions=settings.positions,
        dropout=settings.dropout,
        rope_base=settings.rope_base,
        rope_factor=settings.rope_factor,
    )


def _decoder(family: str, settings: ModelSettings, *, vocab_size: int, context: int, attention: str) -> GPT2:
    config = decoder_config(family, settings, vocab_size=vocab_size, context=context)
    return GPT2(config, attention=attention, residual=settings.residual)


for _family in FAMILIES:
    register("model", _family)(partial(_decoder, _family))


@register("source", "stdlib")
def build_standard_library(settings: DataSettings) -> TextSource:
    return StandardLibrarySource(include_tests=settings.include_tests)


@register("source", "files")
def build_files(settings: DataSettings) -> TextSource:
    path = str(settings.path)
    if saved_folder(path, settings.split) is not None:
        return HubSource(path, settings.split, settings.text_column)
    if settings.split != DataSettings.split:
        raise UserError(
            f"data.split={settings.split} needs a dataset, and {path} was not written by save_to_disk. Remove it."
        )
    return FilesSource(path, **_of_files(settings))


def _of_files(settings: DataSettings) -> dict[str, Any]:
    names = ("text_column", "encoding", "encoding_errors")
    return {name: getattr(settings, name) for name in names}


def _of_dataset(settings: DataSettings) -> dict[str, Any]:
    shared = {name: getattr(settings, name) for name in ("split", "text_column", "config", "options")}
    return {**shared, "streaming": settings.streaming is not False}


@register("source", "tokens")
def build_token_files(settings: DataSettings) -> TokenSource:
    from flashtrain.data.token_files import TokenFiles

    return TokenFiles(str(settings.path), dtype=settings.dtype, end_of_text=settings.end_of_text)


@register("source", "mixture")
def build_mixture(settings: DataSettings) -> TokenSource:
    from flashtrain.data.mixture import MixtureSource

    found = {}
    for name, (part, weight) in settings.parts().items():
        found[name] = (component("source", part.source)(part), weight)
    return MixtureSource(found)


@register("source", "hub")
def build_hub(settings: DataSettings) -> TextSource:
    return HubSource(str(settings.name), **_of_dataset(settings))


@register("source", "chat")
def build_chat(settings: DataSettings) -> TextSource:
    from flashtrain.data.chat_source import ChatDataset, ChatFiles

    if (settings.path is None) == (settings.name is None):
        raise UserError(
            "data=chat needs data.path=..., a .jsonl or .parquet file, or a folder of them or of save_to_disk; or "
            "data.name=..., a dataset of the hub."
        )
    if settings.path is not None and saved_folder(settings.path, settings.split) is None:
        return ChatFiles(settings.path, **_of_files(settings))
    return ChatDataset(str(settings.name or Path(str(settings.path)).expanduser()), **_of_dataset(settings))


def _usual(settings: OptimizerSettings) -> dict[str, Any]:
    """What every optimiser here takes."""
    return {
        "lr": settings.learning_rate,
        "betas": (settings.betas[0], settings.betas[1]),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }


@register("optimizer", "adamw")
def build_adamw(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    return (adamw_8bit if settings.states == "8bit" else adamw)(model, **_usual(settings))


@register("optimizer", "lamb")
def build_lamb(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    return lamb(model, **_usual(settings))


@register("optimizer", "muon")
def build_muon(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    return muon(model, **_usual(settings), momentum=settings.momentum)


def _schedule(name: str) -> Callable[..., torch.optim.lr_scheduler.LRScheduler]:
    def build(
        optimizer: torch.optim.Optimizer, settings: ScheduleSettings, total_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        warmup = max(1, round(0.05 * total_steps)) if settings.warmup_steps is None else settings.warmup_steps
        return SCHEDULES[name](optimizer, min(warmup, total_steps), total_steps, settings.minimum_ratio)

    return build


for _name in SCHEDULES:
    register("schedule", _name)(_schedule(_name))


@register("mask", "causal")
@register("mask", "document")
def build_document_mask(
    settings: MaskSettings, *, documents: Tensor, positions: Tensor, seqlen: int, device: torch.device
) -> Mask | None:
    return masks.document(documents, causal=True) if settings.documents else None  # None: the model's own causal rule


@register("mask", "window")
def build_window_mask(
    settings: MaskSettings, *, documents: Tensor, positions: Tensor, seqlen: int, device: torch.device
) -> Mask:
    window, within = (int(settings.window or 1) - 1, 0), documents if settings.documents else None
    return masks.sliding_window(seqlen, window, documents=within, device=device)


@register("mask", "chunked")
def build_chunked_mask(
    settings: MaskSettings, *, documents: Tensor, positions: Tensor, seqlen: int, device: torch.device
) -> Mask:
    if not settings.documents:
        positions = torch.arange(seqlen, device=device)[None]
    return masks.document((positions % int(settings.chunk or 1) == 0).cumsum(1), causal=True)  # a document a chunk


@register("mask", "prefix")
def build_prefix_mask(
    settings: MaskSettings, *, documents: Tensor, positions: Tensor, seqlen: int, device: torch.device
) -> Mask:
    if settings.documents:
        return masks.prefix_lm(torch.full_like(documents, int(settings.prefix or 0)), documents=documents)
    return masks.prefix_lm(torch.full((1,), int(settings.prefix or 0), device=device), seqlen=seqlen)


def make_mask(settings: Settings, *, packed: bool = True) -> MaskMaker | None:
    """What LanguageModel and generate make each batch's mask by; None where the model's own causal rule is the mask.
    packed: rows may hold several documents."""
    if settings.mask.name in ("causal", "document") and not (packed and settings.within_documents):
        return None
    own = replace(settings.mask, documents=settings.within_documents)
    return partial(component("mask", own.name), own)


def attended_context(settings: Settings) -> int:
    """The context of causal rows whose tokens see as many tokens on average as the mask shows them in a row of one
    document: what FLOPs are counted at. How long the documents are is not known before they are read."""
    make = make_mask(settings, packed=False)
    if make is None:
        return settings.context
    from flashtrain.distributed.context.work import visible_keys

    mask = row_mask(make, settings.context, torch.device("cpu"))
    return settings.context if mask is None else max(1, round(2 * visible_keys(mask).double().mean().item() - 1))


def make_source(settings: Settings) -> TextSource | TokenSource:
    """The source that `data` names."""
    return component("source", settings.data.source)(settings.data)


def make_validation(settings: Settings) -> Any:
    """The source that `data.validation_path` names; None where it names none."""
    data = settings.data
    if data.validation_path is None:
        return None
    kind = data.source if data.source in ("chat", "tokens") else "files"
    source = component("source", kind)(replace(data, path=data.validation_path, name=None))
    return held_out(source) or source


def make_sources(settings: Settings) -> tuple[Any, Any]:
    """The source, and what is held out as a source of its own (None: files named for it, or drawn documents). Where all
    is scored and nothing trained (data.validation_fraction=1) the source is that."""
    source, validation = make_source(settings), make_validation(settings)
    if settings.data.validation_fraction != 1:
        return source, validation
    return validation or held_out(source) or source, None


def make_tokenizer_spec(settings: Settings) -> TokenizerSpec | Tokenizer:
    """Which tokenizer to make; a `bpe` is trained on the source, the others come as they are."""
    data = settings.data
    if data.tokenizer == "huggingface":
        from flashtrain.integrations.huggingface_folder import tokenizer_of

        return tokenizer_of(settings.model.path, begin_of_text=data.begin_of_text)
    return TokenizerSpec(
        data.tokenizer, data.vocab_size, vocab=data.vocab, merges=data.merges, begin_of_text=data.begin_of_text
    )


def vocabulary_of(data: DataSettings) -> int:
    """How many tokens `data.tokenizer` has, as it is known before any text is read. Raises UserError."""
    if data.tokenizer in VOCABULARY:
        return VOCABULARY[data.tokenizer]
    if data.tokenizer in get_args(options.Tokenizer):
        return data.vocab_size
    return huggingface_tokenizer(data.tokenizer).vocab_size


def make_model(settings: Settings, *, vocab_size: int, attention: str) -> Trainable:
    """The model that `model` names, with this attention, for this vocabulary and `context`."""
    build = component("model", settings.model.name)
    model = build(settings.model, vocab_size=vocab_size, context=settings.context, attention=attention)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model={settings.model.name} was built as {type(model).__name__}, which is no torch.nn.Module."
        )
    if isinstance(model, Trainable):
        check_contract(model, f"model={settings.model.name} ({type(model).__name__})")
    return as_trainable(model)


def loader_workers(asked: int | None, hardware: Hardware) -> int:
    """Processes that read the data: as asked, or two where a GPU must not wait for them."""
    return (2 if hardware.kind == "cuda" else 0) if asked is None else asked


def make_callbacks(settings: Settings) -> list[pl.Callback]:
    """The callbacks that a user's program registered and `trainer.callbacks` names."""
    return [component("callback", name)(settings) for name in settings.trainer.callbacks]


def optimizer_builder(settings: Settings) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A function of the model, as LanguageModel takes it."""
    build = component("optimizer", settings.optimizer.name)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        inner = build(model, settings=settings.optimizer)
        # FSDP2 shards the weights, whose copies its checkpoints would not know.
        masters = settings.optimizer.master_weights and not settings.shards_weights
        half = any(parameter.dtype in HALF for parameter in model.parameters() if parameter.requires_grad)
        if settings.optimizer.states == "host":
            return MasterWeights(inner, host=True)
        return MasterWeights(inner) if masters and half else inner

    return optimizer


def schedule_builder(settings: Settings) -> partial[torch.optim.lr_scheduler.LRScheduler]:
    """A function of the optimiser, as LanguageModel takes it."""
    build = component("schedule", settings.schedule.name)
    return partial(build, settings=settings.schedule, total_steps=settings.trainer.steps)
