"""The config groups that every run has: model, data, attention, memory, optimiser, schedule, trainer, logger, machine.

A None means "decided from the machine or the model when the run starts".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashtrain.data.text_files import ERRORS, UTF_8, check_encoding
from flashtrain.errors import UserError, above, at_least, between, one_of, unknown

ATTENTIONS = ("flash", "sdpa", "standard")
ACCELERATORS = ("auto", "cpu", "gpu")
PRECISIONS = ("bf16-mixed", "16-mixed", "32-true", "bf16-true", "64-true")
TOKENIZERS = ("bytes", "bpe", "gpt2", "huggingface", "none")
SOURCES = ("stdlib", "files", "hub", "tokens", "mixture", "chat")
TOKEN_DTYPES = ("uint16", "uint32")
# What flashtrain.data.chat_template and chat_datamodule know, by name: few runs need them.
TRAIN_ON = ("assistant", "all")
TOO_LONG = ("cut", "drop", "refuse")
# Sources that read what these settings name: elsewhere they would be passed over in silence.
READ_BY = {
    "path": ("files", "tokens", "chat"),
    "name": ("hub", "chat"),
    "mixture": ("mixture",),
    "validation_path": ("stdlib", "files", "hub", "tokens", "chat"),
}
# What a source of data=mixture may be, and be told.
PARTS = ("files", "hub", "stdlib", "tokens")
KINDS_OF_A_PART: dict[str, type] = {
    "streaming": bool, "include_tests": bool, "end_of_text": int, "options": dict,
}  # fmt: skip
OF_A_PART = (
    "source", "weight", "path", "name", "config", "split", "text_column", "encoding", "encoding_errors", "dtype",
    *KINDS_OF_A_PART,
)  # fmt: skip
# Of the decoders that ship with flashtrain (models/gpt2.py has them with their numbers, and may not be read here).
DECODERS = ("gpt2", "modern", "plain")
DECODER_SIZES = ("demo", "124m", "355m", "774m", "1.3b", "1.5b")
POSITIONS = ("learned", "rotary")
RESIDUALS = ("weights", "compute")
ADAPTERS = ("lora",)
CHECKPOINTING = ("none", "selective", "full", "auto")
MASKS = ("causal", "document", "window", "prefix", "chunked")
LOGGERS = ("none", "csv", "tensorboard", "wandb")  # csv: an older name of none


_OF_TRANSFORMERS = ("path", "config", "adapter")
_OF_ADAPTERS = ("adapter_rank", "adapter_alpha", "adapter_targets", "adapter_dropout", "quantize")
_OF_OUR_DECODERS = ("size", "positions", "dropout", "vocab_rows", "interpolate_positions")


def no_options(group: str, name: str, options: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise UserError where one of our own components is given options, which those of a program alone read."""
    if options and name in ours:
        raise UserError(
            f"{group}.options={dict(options)} is read by a {group} that a program registered, not by {name}."
        )


@dataclass
class ModelSettings:
    """conf/model: which registered model, and its size. `options` reaches models registered by a user's program.

    rope_base, rope_factor: of rotary positions (None: 10000 and 1, or what the weights have); interpolate_positions:
    stretch learned ones when starting from weights, or evaluating a checkpoint, at a longer context.
    `residual`: between the blocks, under mixed precision, the weights' float32 or the compute's half precision.
    path, config: of model=huggingface, a transformers folder or a name of the hub, or (for random weights) a
    config.json or a model type such as llama, of which `options` changes entries.
    adapter, adapter_rank, adapter_alpha, adapter_targets, adapter_dropout: lora (Hu et al. 2021) trains two thin
    matrices beside each of the targets, alpha / rank times their product, and leaves the weights as they are.
    """

    name: str = "gpt2"
    size: str = "124m"  # demo, 124m, 355m, 774m, 1.3b or 1.5b
    positions: str | None = None  # learned | rotary; null: the family's own
    dropout: float = 0.0  # a probability, of embeddings, attention weights and both branches of a block
    vocab_rows: int | None = None  # rows of the embedding table; null: the vocabulary rounded up to a multiple of 64
    rope_base: float | None = None
    rope_factor: float | None = None
    interpolate_positions: bool = False
    residual: str = "compute"
    path: str | None = None
    config: str | None = None
    adapter: str | None = None  # lora
    adapter_rank: int = 16
    adapter_alpha: float | None = None  # null: twice the rank
    adapter_targets: Any = "all-linear"  # or names of layers: [q_proj,v_proj]
    adapter_dropout: float = 0.0  # a probability, of what an adapter reads
    quantize: str | None = None  # nf4: what an adapter leaves as it is in 4 bits, by torchao
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Family and size, such as gpt2-124m; a transformers model's folder, hub name or type."""
        given = self.path or self.config
        return f"{self.name}-{self.size}" if given is None else Path(given.removesuffix("/config.json")).name

    def target_names(self) -> list[str]:
        """adapter_targets as a list, which may also be one text with commas. UserError: it is neither."""
        given = self.adapter_targets
        names = given.split(",") if isinstance(given, str) else given
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise UserError(f"model.adapter_targets={given}. Possible: all-linear, or layers' names: [q_proj,v_proj].")
        return names

    def check(self) -> None:
        if self.path is not None and self.config is not None:
            raise UserError("model.path has weights and model.config draws them at random: leave one of them out.")
        if self.adapter is not None:
            one_of("model.adapter", self.adapter, ADAPTERS)
        self._check_used()
        at_least("model.adapter_rank", self.adapter_rank, 1)
        self.target_names()
        between("model.adapter_dropout", self.adapter_dropout, 0.0, 1.0, include_high=False)
        above("model.adapter_alpha", self.adapter_alpha, 0)
        above("model.rope_base", self.rope_base, 1)
        at_least("model.rope_factor", self.rope_factor, 1)
        if self.name in DECODERS:
            one_of("model size", self.size, DECODER_SIZES)
            one_of("positions", self.positions or POSITIONS[0], POSITIONS)
        one_of("model.residual", self.residual, RESIDUALS)
        between("model.dropout", self.dropout, 0.0, 1.0, include_high=False)
        at_least("model.vocab_rows", self.vocab_rows, 1)

    def _check_used(self) -> None:
        """Raise UserError for a setting that this kind of model, or a model without an adapter, would pass over."""
        plain = ModelSettings()
        own = [name for name in vars(plain) if getattr(self, name) != getattr(plain, name)]
        transformers = self.name == "huggingface"
        for name in own:
            if name in _OF_ADAPTERS and self.adapter is None:
                raise UserError(f"model.{name}={getattr(self, name)} is of an adapter: add model.adapter=lora.")
            if name in _OF_TRANSFORMERS and not transformers:
                raise UserError(f"model.{name}={getattr(self, name)} is of model=huggingface (recipe=hf).")
            if name in _OF_OUR_DECODERS and transformers:
                raise UserError(
                    f"model.{name}={getattr(self, name)} is of flashtrain's own decoders; model=huggingface is as its "
                    "configuration says (model.options)."
                )
        no_options("model", self.name, self.options, DECODERS)


@dataclass
class DataSettings:
    """conf/data: where text comes from, how it becomes tokens, and how tokens become samples.

    validation_tokens: held-out tokens of each validation (None: at most 524,288, and a tenth of the training's time).
    split_context: hold out as for samples of this length (None: `context`): see TextDataModule.
    begin_of_text: what AutoTokenizer(FOLDER) puts before a text (Llama's begin of text, nothing of GPT-2's) stands
    before each document, prompt and scored text.
    streaming: of data=files and hub: true: text becomes tokens while it is trained on, and nothing is written; null: a
    token file is written first, of data=hub while it is downloaded; false (data=hub): a copy of the dataset is.
    """

    source: str = "stdlib"
    path: str | None = None  # of data=files, tokens, chat: a file or a folder
    validation_path: str | None = None  # a file or folder of text, tokens or conversations that is held out
    dtype: str | None = None  # of data=tokens: of .bin files without a header, uint16 | uint32
    mixture: Any = None  # of data=mixture: {NAME: {path: ..., weight: 2}, ...}
    end_of_text: int | None = None  # of data=tokens: the id between documents; null: the tokenizer's
    name: str | None = None  # of data=hub, chat: the dataset
    config: str | None = None  # of data=hub, chat: the dataset's configuration
    split: str = "train"  # of data=hub, chat, and of data=files a folder of save_to_disk: the dataset's split
    text_column: str = "text"  # the field of .jsonl lines, .parquet rows and hub datasets that holds the text
    encoding: str = UTF_8  # of text files: any of Python's text encodings
    encoding_errors: str = "strict"  # of bytes that are no text: strict names their place, replace counts them
    streaming: bool | None = None
    include_tests: bool = True  # of data=stdlib: with the standard library's tests
    tokenizer: str = "bpe"  # bytes | bpe (trained on the text) | gpt2 | a folder | huggingface (of model.path) | none
    vocab_size: int = 50257  # tokens of data.tokenizer=bpe and none
    vocab: str | None = None  # of data.tokenizer=gpt2: a local vocab.json
    merges: str | None = None  # of data.tokenizer=gpt2: a local merges.txt
    begin_of_text: bool = True
    document_mask: bool = False  # the same as mask.documents=true
    validation_fraction: float = 0.02  # of the documents, held out where no file is named for it; 1 (evaluate): all
    validation_tokens: int | None = None
    split_context: int | None = None
    workers: int | None = None
    cache_dir: str | None = None  # where token files lie; null: FLASHTRAIN_CACHE, else the user's cache folder
    train_on: str = "assistant"  # of data=chat: assistant | all, the tokens whose loss counts
    chat_template: str | None = None  # of data=chat: a file with a Jinja template in place of the tokenizer's own
    too_long: str = "cut"  # of data=chat: cut | drop | refuse, a conversation longer than the context
    skip_broken: float = 0.0  # of data=chat: share of rows that may be broken and are left out; 0 refuses the first
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def first_words(self) -> str:
        """How a sample begins where no prompt is given: as the text that was trained on may begin."""
        if self.tokenizer == "none":
            return "0"  # a token's id
        return {"stdlib": "import ", "chat": "Hello!"}.get(self.source, "The ")

    def check(self) -> None:
        if self.source == "files" and not self.path:
            raise UserError("data=files needs data.path=..., a file or folder of .txt, .md, .jsonl or .parquet.")
        if self.source == "hub" and not self.name:
            raise UserError(
                "data=hub needs data.name=..., a dataset of the Hugging Face hub such as roneneldan/TinyStories."
            )
        if self.source == "tokens" and not self.path:
            raise UserError("data=tokens needs data.path=..., a .npy or .bin file of tokens, or a folder of them.")
        if self.source == "mixture":
            self._check_mixture()
        if self.dtype is not None:
            one_of("data.dtype", self.dtype, TOKEN_DTYPES)
        at_least("data.end_of_text", self.end_of_text, 0)
        self._check_tokenizer()
        if self.source == "chat" and self.tokenizer in ("bytes", "bpe", "gpt2"):
            raise UserError(
                f"data=chat with data.tokenizer={self.tokenizer}: conversations need a tokenizer with a chat template. "
                "Possible: data.tokenizer=FOLDER, as Hugging Face has it."
            )
        one_of("data.train_on", self.train_on, TRAIN_ON)
        one_of("data.too_long", self.too_long, TOO_LONG)
        between("data.skip_broken", self.skip_broken, 0.0, 1.0, include_high=False)
        check_encoding(self.encoding)
        one_of("data.encoding_errors", self.encoding_errors, ERRORS)
        if (self.vocab is None) != (self.merges is None):
            raise UserError("data.vocab and data.merges belong together: give both files, or neither to use the hub's.")
        if self.vocab is not None and self.tokenizer != "gpt2":
            raise UserError(f"data.vocab={self.vocab} is of data.tokenizer=gpt2, and this is {self.tokenizer}.")
        for name, sources in READ_BY.items():
            given = getattr(self, name)
            if given is not None and self.source in SOURCES and self.source not in sources:
                by = " or ".join(f"data={source}" for source in sources)
                raise UserError(f"data.{name}={given} is for {by}, and this is data={self.source}: leave it out.")
        no_options("data", self.source, self.options, [one for one in SOURCES if one != "hub"])
        if self.validation_fraction != 1:
            between("data.validation_fraction", self.validation_fraction, 0.0, 0.5)
        at_least("data.validation_tokens", self.validation_tokens, 1)
        at_least("data.split_context", self.split_context, 1)
        at_least("data.workers", self.workers, 0)

    def parts(self) -> dict[str, tuple[DataSettings, float]]:
        """The settings of each source of a mixture, with the tokenizer of all, and its weight. Raises UserError."""
        found = {}
        for name, given in (self.mixture or {}).items():
            where = f"data.mixture.{name}"
            if not isinstance(given, dict):
                raise UserError(f"{where}={given} must be settings of a source, such as {{path: FOLDER, weight: 2}}.")
            odd = [key for key in given if key not in OF_A_PART]
            if odd:
                raise unknown(f"setting of {where}", str(odd[0]), OF_A_PART)
            own = {key: value for key, value in given.items() if key != "weight"}
            source = own.pop("source", "files" if "path" in own else "hub" if "name" in own else "stdlib")
            weight = given.get("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise UserError(f"{where}.weight={weight} must be a number above 0.")
            for key, value in own.items():
                if not isinstance(value, KINDS_OF_A_PART.get(key, str)):
                    raise UserError(f"{where}.{key}={value} must be {KINDS_OF_A_PART.get(key, str).__name__}.")
            shared = {key: getattr(self, key) for key in ("tokenizer", "vocab_size", "vocab", "merges")}
            found[name] = (DataSettings(source=source, **own, **shared), float(weight))
        return found

    def _check_mixture(self) -> None:
        if not isinstance(self.mixture, dict) or not self.mixture:
            raise UserError("data=mixture needs data.mixture={NAME: {path: FOLDER, weight: 2}, OTHER: {path: ...}}.")
        for name, (part, _) in self.parts().items():
            try:
                one_of("source", part.source, PARTS)
                part.check()
            except UserError as error:
                raise UserError(f"data.mixture.{name}: {error}") from error

    def _check_tokenizer(self) -> None:
        if self.tokenizer not in TOKENIZERS and not Path(self.tokenizer).expanduser().is_dir():
            listed = (*TOKENIZERS, "a folder with tokenizer.json")
            raise unknown("data.tokenizer", self.tokenizer, TOKENIZERS, listed=listed)
        if self.tokenizer == "none" and self.source != "tokens":
            raise UserError(f"data.tokenizer=none is for data=tokens, and data={self.source} is text.")
        if self.streaming and self.tokenizer == "bpe":
            raise UserError(
                "data.streaming=true makes tokens while it trains, and data.tokenizer=bpe is trained before that: "
                "choose gpt2, bytes or a folder with tokenizer.json."
            )
        if self.source != "tokens":
            at_least("data.vocab_size", self.vocab_size, 257)
        elif self.tokenizer == "bpe":
            raise UserError(
                "data.tokenizer=bpe is trained on text: name the tokenizer that the tokens are of, or none."
            )
        elif self.tokenizer == "none" and self.vocab_size < 1:
            raise UserError(
                "data=tokens needs to know which tokens there are: say data.tokenizer=gpt2, bytes or a folder with "
                "tokenizer.json, or data.vocab_size=NUMBER where there is none."
            )


@dataclass
class AttentionSettings:
    """conf/attention: flash (our kernels), sdpa (torch's), standard (the S x S matrix, the paper's baseline)."""

    name: str = "flash"

    def check(self) -> None:
        one_of("attention", self.name, ATTENTIONS)


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
                raise UserError(f"mask.{setting}={value} is of mask={name}, and this is mask={self.name}.")
            at_least(f"mask.{setting}", value, 1)
        no_options("mask", self.name, self.options, MASKS)


@dataclass
class MemorySettings:
    """conf/memory: what is done to need less memory for activations. Same losses and gradients, more time.

    `checkpointing`: what of a block stays for its backward: none leaves nothing out, selective keeps its input and
    attention's output, full its input; auto takes the cheapest that is estimated to fit. `offload`: those inputs wait
    in host memory. `ffn_chunk`, `loss_chunk`: tokens at once in the feed-forward and in the loss; None: auto or all.
    """

    checkpointing: str = "auto"
    offload: bool = False
    ffn_chunk: int | None = None
    loss_chunk: int | None = None

    def check(self) -> None:
        one_of("memory.checkpointing", self.checkpointing, CHECKPOINTING)
        if self.offload and self.checkpointing == "none":
            raise UserError(
                "memory.offload=true moves the inputs of blocks to host memory; memory=none keeps all of a block: "
                "choose memory=selective, memory=full or memory=auto."
            )
        for name in ("ffn_chunk", "loss_chunk"):
            value = getattr(self, name)
            at_least(f"memory.{name}", value, 1)


@dataclass
class LoggerSettings:
    """conf/logger: every run writes metrics.jsonl; wandb adds Weights & Biases, online when a key is configured."""

    name: str = "wandb"  # none (older: csv), tensorboard or wandb; or several: logger=[tensorboard,wandb]
    project: str = "flashtrain"  # of Weights & Biases
    run_name: str | None = None  # of Weights & Biases
    group: str | None = None  # runs of one sweep share a group
    mode: str = "auto"  # auto | online | offline

    @property
    def kinds(self) -> list[str]:
        """The loggers by name; `name` holds several with commas between them."""
        return [kind.strip() for kind in self.name.split(",")]

    def check_installed(self) -> None:
        """Raise UserError where a logger's package is not there."""
        for kind in self.kinds:
            if kind in ("tensorboard", "wandb") and find_spec(kind) is None:
                raise UserError(f"logger={kind} needs the package {kind}, which is not installed: pip install {kind}")

    def check(self) -> None:
        for kind in self.kinds:
            one_of("logger", kind, LOGGERS)
        one_of("logger.mode", self.mode, ("auto", "online", "offline"))


@dataclass
class HardwareSettings:
    """conf/hardware: what to run on. `demo` auto trains a recipe's small demo where there is no GPU."""

    accelerator: str = "auto"
    precision: str | None = None  # 64-true: with ddp or one device alone; null: what the device does best
    peak_tflops: float | None = None  # dense peak for MFU; null: from flashtrain's table, or MFU left out
    demo: str = "auto"  # auto | always | never

    def check(self) -> None:
        one_of("hardware.accelerator", self.accelerator, ACCELERATORS)
        one_of("hardware.demo", self.demo, ("auto", "always", "never"))
        if self.precision is not None:
            one_of("hardware.precision", self.precision, PRECISIONS)
        above("hardware.peak_tflops", self.peak_tflops, 0)


@dataclass
class GenerateSettings:
    """The sample that a run prints at its end, and what mode=generate writes."""

    tokens: int = 120  # how many are written
    temperature: float = 0.8  # divides the logits; 0 takes the likeliest token
    top_k: int = 50  # tokens are drawn among the so many likeliest

    def check(self) -> None:
        at_least("generate.tokens", self.tokens, 1)
        between("generate.temperature", self.temperature, 0, 1e6)
        at_least("generate.top_k", self.top_k, 1)


OPTIMIZER_STATES = ("full", "8bit", "host")
STRATEGIES = ("auto", "ddp", "fsdp", "context")
CHECKPOINTS = ("auto", "file", "sharded")
# What flashtrain.distributed.context knows, by name: importing it takes seconds, and mistakes are told at once.
CONTEXT_WAYS = ("auto", "all-to-all", "all-gather", "ring", "hybrid")
CONTEXT_LAYOUTS = ("balanced", "head-tail", "contiguous")


@dataclass
class OptimizerSettings:
    """conf/optimizer. `gradient_clip` bounds the global L2 norm of the gradients; 0 leaves them as they are.

    `momentum` is muon's. `master_weights`: a float32 copy of weights that hardware.precision=bf16-true makes bfloat16.
    `states`: AdamW's two moments in full, in 8 bits (Dettmers et al. 2021; torchao's), or full in host memory, where
    the step is then computed: for weights that are not sharded.
    """

    name: str = "adamw"  # adamw, lamb or muon, or one that your program registered
    learning_rate: float = 6e-4  # at the schedule's peak
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW's
    epsilon: float = 1e-8  # added to the denominator of AdamW's step
    weight_decay: float = 0.1  # on matrices only
    gradient_clip: float = 1.0  # bound of the global gradient norm; 0 switches it off
    momentum: float = 0.95  # Muon's
    master_weights: bool = True
    states: str = "full"  # full | 8bit | host
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        one_of("optimizer.states", self.states, OPTIMIZER_STATES)
        if self.states != "full" and self.name != "adamw":
            raise UserError(f"optimizer.states={self.states} is of optimizer=adamw, and this is {self.name}.")
        no_options("optimizer", self.name, self.options, ("adamw", "lamb", "muon"))
        above("optimizer.learning_rate", self.learning_rate, 0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1).")
        at_least("optimizer.epsilon", self.epsilon, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.gradient_clip", self.gradient_clip, 0)
        between("optimizer.momentum", self.momentum, 0.0, 1.0, include_high=False)


@dataclass
class ScheduleSettings:
    """conf/schedule: the learning rate's course. `warmup_steps` None means 5% of the steps, at least one."""

    name: str = "cosine"  # cosine, linear or constant, or one that your program registered
    warmup_steps: int | None = None  # null: 5% of the steps
    minimum_ratio: float = 0.1  # the last learning rate as a share of the peak; 0 comes a step after the last
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        between("schedule.minimum_ratio", self.minimum_ratio, 0.0, 1.0)
        no_options("schedule", self.name, self.options, ("constant", "cosine", "linear"))


@dataclass
class TrainerSettings:
    """conf/trainer: how long, how much a step, on how many devices, and how often to log, validate and save.

    validation_micro_batch: samples at once in a language model's validation, which keeps nothing for a backward (None:
    micro_batch, for which compiled code is there already).
    checkpoint: of strategy=fsdp and context, "file" (one, gathered and written by the first device's process while
    training waits), "sharded" (a folder to which every process writes its part while training goes on; several machines
    need a disk that all of them see) or "auto" (sharded from a thousand million parameters on).
    max_minutes: after so long (from the command's start) the run writes its checkpoint and ends; resume=auto goes on.
    context_way, context_layout, timeout_seconds: of strategy=context, one sequence over several devices: how attention
    is shared (flashtrain/distributed/context/ways.py), who holds which tokens (layout.py), and after how long without
    progress a stuck device ends the job (None: never), more than a step, an evaluation or a checkpoint takes.
    """

    steps: int = 500  # optimiser steps
    tokens_per_step: int = 65536  # over all devices
    micro_batch: int | None = None  # samples a device computes at once; null: from free memory
    validation_micro_batch: int | None = None
    devices: int = 1  # per node
    nodes: int = 1  # machines
    strategy: str = "auto"
    context_way: str = "auto"
    context_layout: str = "balanced"
    timeout_seconds: float | None = 1800.0
    compile: bool | None = None  # torch.compile; null: on GPUs only
    cuda_graphs: bool = False
    log_every: int = 10  # steps between two logged rows
    validate_every: int = 100  # steps between two validations
    checkpoint_every: int = 100  # steps between two checkpoints
    checkpoint: str = "auto"  # auto | file | sharded
    max_minutes: float | None = None
    callbacks: list[str] = field(default_factory=list)  # names registered with flashtrain.register("callback", ...)

    @property
    def ranks(self) -> int:
        """Processes over all nodes, one a device."""
        return self.devices * self.nodes

    def check(self) -> None:
        for name in ("steps", "tokens_per_step", "devices", "nodes", "log_every", "validate_every", "checkpoint_every"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("micro_batch", "validation_micro_batch"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        above("trainer.max_minutes", self.max_minutes, 0)
        one_of("trainer.strategy", self.strategy, STRATEGIES)
        one_of("trainer.checkpoint", self.checkpoint, CHECKPOINTS)
        one_of("trainer.context_way", self.context_way, CONTEXT_WAYS)
        one_of("trainer.context_layout", self.context_layout, CONTEXT_LAYOUTS)
        above("trainer.timeout_seconds", self.timeout_seconds, 0)
