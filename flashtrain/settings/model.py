"""The group `model` of language models: which decoder, its size and its adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from flashtrain.errors import UserError, above, at_least, between, needs_package, one_of
from flashtrain.files.json_files import read_json
from flashtrain.settings.options import (
    Adapter,
    DecoderName,
    DecoderSize,
    Float8,
    Positions,
    Quantize,
    Residual,
    Rope,
    option,
)
from flashtrain.settings.training import no_options

NOTE = "flashtrain.json"  # of an export: its checkpoint, the model's label and rotary positions
_OF_TRANSFORMERS = ("path", "config", "adapter", "adapter_path")
_OF_ADAPTERS = ("adapter_rank", "adapter_alpha", "adapter_targets", "adapter_dropout", "quantize")
_NO_ADAPTER = "adapters. Set model.adapter=lora; an adapter in model.path goes on with its own."
SHAPE = ("layers", "width", "heads", "ffn")  # with weights: as they were trained
LAYERS = ("kv_heads", "pattern")  # weights are changed to them
OWN_SIZES = (*SHAPE, *LAYERS)
_OF_OUR_DECODERS = (
    "size",
    *OWN_SIZES,
    "positions",
    "dropout",
    "vocab_rows",
    "interpolate_positions",
)


@dataclass
class ModelSettings:
    """The decoder that is trained, its size and its adapter (conf/model)."""

    name: str = "gpt2"  # the decoder: gpt2, llama, transnormer, huggingface, or a registered one
    # layers, heads and width of flashtrain's own decoders.
    size: str = option("124m", DecoderSize, others=True)
    # Number of layers of flashtrain's own decoders; null: the size's, as the next four.
    layers: int | None = None
    width: int | None = None  # embedding width
    heads: int | None = None  # query heads of a layer
    kv_heads: int | None = None  # key/value heads of a layer; those of weights= become means
    # width inside the feed-forward; null: 4 times the width, of llama 8/3 times.
    ffn: int | None = None
    # The layers, repeated: full, window:TOKENS, chunk:TOKENS, nope (without positions), or a
    # mixer's name, such as mamba2; full of transnormer: its own.
    pattern: Any = field(default_factory=lambda: ["full"])
    # How positions of tokens are encoded; null: the family's own.
    positions: str | None = option(None, Positions, others=True)
    # Probability of dropping embeddings, attention weights and outputs of a block's two branches.
    dropout: float = 0.0
    # Rows of the embedding table; null: the vocabulary rounded up to a multiple of 64.
    vocab_rows: int | None = None
    rope_base: float | None = None  # base of rotary positions; null: 10000, or that of the weights
    # How rope_factor scales: ntk (the base), or as Hugging Face's; null: as the weights, or ntk.
    rope: str | None = option(None, Rope)
    # Scales rotary positions for a longer context; null: 1, or as the weights.
    rope_factor: float | None = None
    # Numbers and scales positions of model=huggingface as runs until November 2026 did.
    older_positions: bool = False
    # Stretch learned positions of weights or a checkpoint to a longer context.
    interpolate_positions: bool = False
    # The dtype between blocks under autocast: compute (half precision) or weights (float32).
    residual: str = option("compute", Residual)
    # A folder of transformers or of peft, a name of the hub, or a run (model=huggingface).
    path: str | None = None
    # For random weights (model=huggingface): a config.json; tiny, llama-1b, llama-3b, llama-8b,
    # qwen3-8b, qwen3.5-9b or nemotron-3-nano-30b, which have these models' sizes; or a type such
    # as llama with transformers' default sizes.
    config: str | None = None
    # Lora (Hu et al. 2021): train two thin matrices at each target alone.
    adapter: str | None = option(None, Adapter)
    adapter_rank: int = 16  # the width of an adapter's two matrices
    # Factor of an adapter's product, over the rank; null: twice the rank.
    adapter_alpha: float | None = None
    # Layers with an adapter: all-linear, [q_proj,v_proj], or a regular expression of whole names.
    adapter_targets: Any = "all-linear"
    adapter_dropout: float = 0.0  # probability of dropping what an adapter reads
    # Where the adapter starts from: a folder of peft, or a run; model.path names it too.
    adapter_path: str | None = None
    # Weights beside an adapter: nf4 stores them in 4 bits, by torchao.
    quantize: str | None = option(None, Quantize)
    # Trains the blocks' large linear layers in float8, by torchao: with a scale a tensor
    # (tensorwise), a row (rowwise), or that with weight gradients in bf16 (rowwise_with_gw_hp).
    float8: str | None = option(None, Float8)
    # Of a registered model, or changes to a Hugging Face configuration: +model.options.NAME=VALUE.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name: family and size, such as gpt2-124m, or a transformers
        model's folder, name or type."""
        given = self.path or self.config
        if given is not None:
            folder = Path(given.removesuffix("/config.json")).expanduser()
            note = read_json(folder / NOTE) if (folder / NOTE).is_file() else {}
            return note.get("label", folder.name)
        if self.name not in get_args(DecoderName):
            return self.name
        size, sizes = self.size, ["layers", "width", "heads", "kv_heads", "ffn"]
        if self.layers is not None and self.width is not None:
            size, sizes = f"{self.layers}x{self.width}", sizes[2:]
        own = [f"{name}{value}" for name in sizes if (value := getattr(self, name)) is not None]
        pattern = (
            [] if self.pattern == ["full"] else ["+".join(map(str, self.pattern)).replace(":", "")]
        )
        return "-".join([self.name, size, *own, *pattern])

    @property
    def own_layers(self) -> bool:
        """Whether settings replace sizes or the pattern of layers that come with model.size."""
        plain = ModelSettings()
        return any(getattr(self, name) != getattr(plain, name) for name in OWN_SIZES)

    def target_names(self) -> str | list[str]:
        """Return adapter_targets as peft takes it: all-linear or a regular expression as a text,
        layers' names as a list. Raises UserError unless it is one of these."""
        given = self.adapter_targets
        if isinstance(given, str) and re.search(r"[^\w.,-]", given):
            return given
        names = given.split(",") if isinstance(given, str) else given
        if (
            not isinstance(names, list | set)
            or not names
            or not all(isinstance(name, str) and name for name in names)
        ):
            raise UserError(
                f"model.adapter_targets={given}. "
                "Expected all-linear, or layers' names: [q_proj,v_proj], or a regular expression."
            )
        return "all-linear" if names == ["all-linear"] else sorted(names)

    def check(self) -> None:
        if self.name == "huggingface":
            with needs_package("model=huggingface", "transformers", "hub"):
                version("transformers")  # whose import takes seconds
        if self.path is not None and self.config is not None:
            raise UserError(
                "model.path=... loads trained weights, and model.config=... makes random ones. "
                "Remove one of the two."
            )
        self._check_used()
        at_least("model.adapter_rank", self.adapter_rank, 1)
        self.target_names()
        between("model.adapter_dropout", self.adapter_dropout, 0.0, 1.0, include_high=False)
        above("model.adapter_alpha", self.adapter_alpha, 0)
        above("model.rope_base", self.rope_base, 1)
        at_least("model.rope_factor", self.rope_factor, 1)
        if self.name in get_args(DecoderName):
            one_of("model.size", self.size, get_args(DecoderSize))
            one_of("model.positions", self.positions or "learned", get_args(Positions))
        between("model.dropout", self.dropout, 0.0, 1.0, include_high=False)
        for name in ("vocab_rows", "layers", "width", "heads", "kv_heads", "ffn"):
            at_least(f"model.{name}", getattr(self, name), 1)
        if not isinstance(self.pattern, list) or not self.pattern:
            raise UserError(
                f"model.pattern={self.pattern}. "
                "Expected a list of layers: [window:1024,window:1024,full]."
            )

    def _check_used(self) -> None:
        """Raise UserError for a changed setting that the model does not use, because it is of
        another kind or has no adapter."""
        plain, transformers = ModelSettings(), self.name == "huggingface"
        for names, used, by in (
            (_OF_ADAPTERS, self.adapter is not None, _NO_ADAPTER),
            (_OF_TRANSFORMERS, transformers, "model=huggingface (recipe=hf). Remove it."),
            (_OF_OUR_DECODERS, not transformers, "flashtrain's own decoders. Use model.options."),
        ):
            given = [name for name in names if getattr(self, name) != getattr(plain, name)]
            if given and not used:
                raise UserError(f"model.{given[0]}={getattr(self, given[0])} is used by {by}")
        no_options("model", self.name, self.options, get_args(DecoderName))
