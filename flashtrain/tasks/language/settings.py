"""The settings of task=language_model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from flashtrain.errors import UserError, above, at_least, between, one_of
from flashtrain.settings.options import Adapter, Decoder, DecoderSize, Mask, Positions, Quantize, Residual, option
from flashtrain.settings.settings import CONTEXT, divisors
from flashtrain.settings.text import TextSettings
from flashtrain.settings.training import no_options

_OF_TRANSFORMERS = ("path", "config", "adapter")
_OF_ADAPTERS = ("adapter_rank", "adapter_alpha", "adapter_targets", "adapter_dropout", "quantize")
_OF_OUR_DECODERS = ("size", "positions", "dropout", "vocab_rows", "interpolate_positions")


@dataclass
class ModelSettings:
    """conf/model: which registered model, and its size."""

    name: str = "gpt2"
    size: str = option("124m", DecoderSize, others=True)  # of flashtrain's own decoders
    positions: str | None = option(None, Positions, others=True)  # null: the family's own
    dropout: float = 0.0  # a probability, of embeddings, attention weights and both branches of a block
    vocab_rows: int | None = None  # rows of the embedding table; null: the vocabulary rounded up to a multiple of 64
    rope_base: float | None = None  # of rotary positions; null: 10000, or what the weights have
    rope_factor: float | None = None  # scales rotary positions for a longer context; null: 1, or what the weights have
    interpolate_positions: bool = False  # stretch learned positions of weights or a checkpoint to a longer context
    residual: str = option("compute", Residual)  # between blocks, under autocast: float32 (weights) or half (compute)
    path: str | None = None  # of model=huggingface: a transformers folder, or a name of the hub
    config: str | None = None  # for random weights: a config.json, or a type such as llama; `options` changes entries
    adapter: str | None = option(None, Adapter)  # lora (Hu et al. 2021): train two thin matrices at each target alone
    adapter_rank: int = 16  # the width of these matrices
    adapter_alpha: float | None = None  # over the rank, the factor of their product; null: twice the rank
    adapter_targets: Any = "all-linear"  # or names of layers: [q_proj,v_proj]
    adapter_dropout: float = 0.0  # a probability, of what an adapter reads
    quantize: str | None = option(None, Quantize)  # what an adapter leaves as it is in 4 bits, by torchao
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The model in a word: family and size, such as gpt2-124m, or a transformers model's folder, name or type."""
        given = self.path or self.config
        return f"{self.name}-{self.size}" if given is None else Path(given.removesuffix("/config.json")).name

    def target_names(self) -> list[str]:
        """Return adapter_targets as a list; UserError if it is no list of names, nor one text with commas."""
        given = self.adapter_targets
        names = given.split(",") if isinstance(given, str) else given
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise UserError(f"model.adapter_targets={given}. Expected all-linear, or layers' names: [q_proj,v_proj].")
        return names

    def check(self) -> None:
        if self.path is not None and self.config is not None:
            raise UserError(
                "model.path has weights, and model.config initialises them at random. Remove one of the two."
            )
        self._check_used()
        at_least("model.adapter_rank", self.adapter_rank, 1)
        self.target_names()
        between("model.adapter_dropout", self.adapter_dropout, 0.0, 1.0, include_high=False)
        above("model.adapter_alpha", self.adapter_alpha, 0)
        above("model.rope_base", self.rope_base, 1)
        at_least("model.rope_factor", self.rope_factor, 1)
        if self.name in get_args(Decoder):
            one_of("model.size", self.size, get_args(DecoderSize))
            one_of("model.positions", self.positions or "learned", get_args(Positions))
        between("model.dropout", self.dropout, 0.0, 1.0, include_high=False)
        at_least("model.vocab_rows", self.vocab_rows, 1)

    def _check_used(self) -> None:
        """Raise UserError for a setting that this kind of model, or a model without an adapter, does not use."""
        plain, transformers = ModelSettings(), self.name == "huggingface"
        for names, used, by in (
            (_OF_ADAPTERS, self.adapter is not None, "adapters. Set model.adapter=lora."),
            (_OF_TRANSFORMERS, transformers, "model=huggingface (recipe=hf). Remove it."),
            (_OF_OUR_DECODERS, not transformers, "flashtrain's own decoders. Use model.options."),
        ):
            given = [name for name in names if getattr(self, name) != getattr(plain, name)]
            if given and not used:
                raise UserError(f"model.{given[0]}={getattr(self, given[0])} is used by {by}")
        no_options("model", self.name, self.options, get_args(Decoder))


@dataclass
class MaskSettings:
    """conf/mask: which tokens a token sees. docs/add-a-mask.md has them in words."""

    name: str = "causal"  # causal, document, window, chunked or prefix, or one that your program registered
    documents: bool = False  # within each document of a packed row alone, and positions begin anew there; any mask
    window: int | None = None  # of mask=window: tokens that a token sees, itself included
    chunk: int | None = None  # of mask=chunked: tokens a chunk, counted from the row's or document's first
    prefix: int | None = None  # of mask=prefix: tokens of the prefix of each row or document; they are not scored
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The mask in words, such as "window 1024 within documents"."""
        own = {"window": self.window, "chunked": self.chunk, "prefix": self.prefix}.get(self.name)
        words = [self.name, *([] if own is None else [str(own)])]
        return " ".join([*words, *(["within documents"] if self.documents and self.name != "document" else [])])

    def check(self) -> None:
        for name, setting, what in (
            ("window", "window", "tokens that each token sees, itself included"),
            ("chunked", "chunk", "tokens of each chunk"),
            ("prefix", "prefix", "tokens of each prefix"),
        ):
            value = getattr(self, setting)
            if self.name == name and value is None:
                raise UserError(f"mask={name} needs mask.{setting}=..., the {what}.")
            if self.name != name and value is not None:
                raise UserError(
                    f"mask.{setting}={value} is used by mask={name}, and this is mask={self.name}. Remove it."
                )
            at_least(f"mask.{setting}", value, 1)
        no_options("mask", self.name, self.options, get_args(Mask))


@dataclass
class GenerateSettings:
    """The sample that a run prints at its end, and what mode=generate writes."""

    max_new_tokens: int = 120  # how many are written
    temperature: float = 0.8  # divides the logits; 0 takes the likeliest token
    top_k: int = 50  # tokens are drawn among the so many likeliest

    def check(self) -> None:
        at_least("generate.max_new_tokens", self.max_new_tokens, 1)
        between("generate.temperature", self.temperature, 0, 1e6)
        at_least("generate.top_k", self.top_k, 1)


@dataclass
class LanguageSettings(TextSettings):
    """Settings of language models."""

    task: str = "language_model"
    context_parallel: int | None = None  # devices that share each sequence; above 1 trainer.strategy=context_parallel
    prompt: str = ""  # for mode=generate, and the sample at a run's end
    model: ModelSettings = field(default_factory=ModelSettings)
    mask: MaskSettings = field(default_factory=MaskSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)

    @property
    def within_documents(self) -> bool:
        """Whether a token sees only its own document of a packed row."""
        return self.mask.name == "document" or self.mask.documents or self.data.document_mask

    @property
    def mask_label(self) -> str:
        """The mask in words, however documents were set to be masked."""
        label = replace(self.mask, documents=self.within_documents).label
        return "document" if label == "causal within documents" else label

    @property
    def strategy(self) -> str:
        """trainer.strategy, or "context_parallel" where that is auto and context_parallel is above 1."""
        strategy = self.trainer.strategy
        return CONTEXT if strategy == "auto" and (self.context_parallel or 1) > 1 else strategy

    @property
    def context_degree(self) -> int:
        """Devices that share a sequence; 1 where each has its own."""
        return (self.context_parallel or self.trainer.ranks) if self.strategy == CONTEXT else 1

    def check(self) -> None:
        super().check()
        if self.model.quantize is not None and self.shards_weights:
            raise UserError(
                f"model.quantize={self.model.quantize} needs whole weights on each device. Use trainer.strategy=ddp."
            )
        if self.model.name == "huggingface" and self.mask.name not in ("causal", "document"):
            raise UserError(
                f"mask={self.mask.name} is used by flashtrain's own decoders. With model=huggingface use "
                "mask=causal (its own) or mask=document."
            )
        at_least("context_parallel", self.context_parallel, 1)
        if self.mode in ("train", "plan"):  # others may name it: their settings are those of a trained checkpoint
            self.check_context()

    def check_context(self) -> None:
        """Raise UserError if a training requests context parallelism and cannot have it."""
        degree, named = self.context_parallel, self.trainer.strategy
        if self.strategy != CONTEXT:
            if degree is not None and degree > 1:
                raise UserError(
                    f"context_parallel={degree} shards sequences over devices, and trainer.strategy={named} does not. "
                    "Use trainer.strategy=context_parallel, or context_parallel=1."
                )
            method, layout = self.trainer.context_parallel_method, self.trainer.context_parallel_layout
            if degree is None and (method != "auto" or layout != "balanced"):
                given = f"context_parallel_method={method}" if method != "auto" else f"context_parallel_layout={layout}"
                raise UserError(
                    f"trainer.{given} is used with context parallelism. Set context_parallel=2 (or more), or remove it."
                )
            return
        degree, ranks = self.context_degree, self.trainer.ranks
        if ranks % degree:
            raise UserError(
                f"context_parallel={degree} does not divide {ranks} device(s), trainer.devices x trainer.nodes. "
                f"Use context_parallel={', '.join(map(str, divisors(ranks)))}, or trainer.devices={degree}."
            )
        if self.attention.name != "flash":
            raise UserError(
                f"attention={self.attention.name} computes whole sequences on one device, and context parallelism "
                "shards them. Use attention=flash."
            )
        if self.trainer.cuda_graphs:
            raise UserError(
                "trainer.cuda_graphs=true cannot record the communication of context parallelism. "
                "Use trainer.cuda_graphs=false."
            )
