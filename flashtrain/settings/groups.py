"""The config groups that every run has: which model, data, attention, memory savings, logger, machine and sample.

(Optimiser, schedule and trainer are in trainer_settings.py.) A None means "decided from the machine or the model when
the run starts".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from flashtrain.data.text_files import UTF_8, check_encoding
from flashtrain.errors import UserError
from flashtrain.files.foreign_files import DEFAULT_LONGEST
from flashtrain.settings.setting_checks import at_least, between, one_of

ATTENTIONS = ("flash", "sdpa", "standard")
ACCELERATORS = ("auto", "cpu", "gpu")
PRECISIONS = ("bf16-mixed", "16-mixed", "32-true", "bf16-true", "64-true")
TOKENIZERS = ("bytes", "bpe", "gpt2")
SOURCES = ("stdlib", "files", "hub")
# Settings of conf/data that not every source, or not every tokenizer, heeds, and which ones do.
# (include_tests is not among them: commands of published results name it beside data=files.)
HEEDED_BY = {
    "path": "data=files",
    "name": "data=hub",
    "config": "data=hub",
    "split": "data=hub",
    "streaming": "data=hub",
    "text_column": "data=files or data=hub",
    "encoding": "data=files",
    "longest_document": "data=files",
    "options": "data=SOURCE, one that a program of your own registered",
    "vocab": "data.tokenizer=gpt2",
    "merges": "data.tokenizer=gpt2",
}
CHECKPOINTING = ("none", "selective", "full", "auto")
LOGGERS = ("none", "csv", "wandb")


@dataclass
class ModelSettings:
    """conf/model: which registered model, and its size. `options` reaches models registered by a user's program.

    rope_base, rope_factor: of rotary positions (None: 10000 and 1, or what the weights have); interpolate_positions:
    stretch learned ones when starting from weights, or evaluating a checkpoint, at a longer context.
    `residual`: between the blocks, under mixed precision, the weights' float32 or the compute's half precision.
    """

    name: str = "gpt2"
    size: str = "124m"
    positions: str | None = None
    dropout: float = 0.0
    vocab_rows: int | None = None
    rope_base: float | None = None
    rope_factor: float | None = None
    interpolate_positions: bool = False
    residual: str = "compute"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Family and size, such as gpt2-124m."""
        return f"{self.name}-{self.size}"

    def check(self) -> None:
        if self.rope_base is not None and not self.rope_base > 1:
            raise UserError(f"model.rope_base={self.rope_base:g} must be above 1 (10000 is usual).")
        if self.rope_factor is not None:
            at_least("model.rope_factor", self.rope_factor, 1)
        one_of("model.residual", self.residual, ("weights", "compute"))
        between("model.dropout", self.dropout, 0.0, 1.0, include_high=False)
        if self.vocab_rows is not None:
            at_least("model.vocab_rows", self.vocab_rows, 1)


@dataclass
class DataSettings:
    """conf/data: where text comes from, how it becomes tokens, and how tokens become samples.

    validation_tokens: held-out tokens of each validation (None: at most 524,288, and a tenth of the training's time).
    split_context: hold out as for samples of this length (None: `context`): see TextDataModule. encoding: of text files
    (any of Python's text encodings). longest_document: bytes, uncompressed, of a text file or a line of .jsonl.
    """

    source: str = "stdlib"
    path: str | None = None
    name: str | None = None
    config: str | None = None
    split: str = "train"
    text_column: str = "text"
    encoding: str = UTF_8
    longest_document: int = DEFAULT_LONGEST
    streaming: bool = True
    include_tests: bool = True
    tokenizer: str = "bpe"
    vocab_size: int = 50257
    vocab: str | None = None
    merges: str | None = None
    document_mask: bool = False
    validation_fraction: float = 0.02
    validation_tokens: int | None = None
    split_context: int | None = None
    workers: int | None = None
    cache_dir: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def first_words(self) -> str:
        """How a sample begins where no prompt is given: as the text that was trained on may begin."""
        return "import " if self.source == "stdlib" else "The "

    def check(self) -> None:
        if self.source == "files" and not self.path:
            raise UserError("data=files needs data.path=..., a file or folder of .txt, .md, .jsonl or .parquet.")
        if self.source == "hub" and not self.name:
            raise UserError(
                "data=hub needs data.name=..., a dataset of the Hugging Face hub such as roneneldan/TinyStories."
            )
        one_of("data.tokenizer", self.tokenizer, TOKENIZERS)
        check_encoding(self.encoding)
        at_least("data.longest_document", self.longest_document, 1)
        at_least("data.vocab_size", self.vocab_size, 257)
        if (self.vocab is None) != (self.merges is None):
            raise UserError("data.vocab and data.merges belong together: give both files, or neither to use the hub's.")
        for name in unheeded(self):
            raise UserError(
                f"data.{name}={getattr(self, name)} is for {HEEDED_BY[name]}, and this is data={self.source} "
                f"data.tokenizer={self.tokenizer}: leave it out."
            )
        between("data.validation_fraction", self.validation_fraction, 0.0, 0.5)
        if self.validation_tokens is not None:
            at_least("data.validation_tokens", self.validation_tokens, 1)
        if self.split_context is not None:
            at_least("data.split_context", self.split_context, 1)
        if self.workers is not None:
            at_least("data.workers", self.workers, 0)


def unheeded(data: DataSettings) -> list[str]:
    """The settings of `data` that are not at their defaults, and that its source or tokenizer knows nothing of.

    Of a source that a program registered nobody knows what it heeds.
    """
    plain = DataSettings()
    changed = [name for name in HEEDED_BY if getattr(data, name) != getattr(plain, name)]
    heeded = [f"data.tokenizer={data.tokenizer}", f"data={data.source}"]
    ours = data.source in SOURCES
    return [
        name
        for name in changed
        if not any(word in HEEDED_BY[name].split(" or ") for word in heeded)
        and (ours or "tokenizer" in HEEDED_BY[name])
    ]


def forget_unheeded(data: DataSettings, given: Collection[str]) -> None:
    """Set what `data` does not heed back to its default: what a demo or an earlier run said of another source.

    given: dotted settings that the user named; they stay, and DataSettings.check says that they are not heeded.
    """
    plain = DataSettings()
    for name in unheeded(data):
        if f"data.{name}" not in given:
            setattr(data, name, getattr(plain, name))


@dataclass
class AttentionSettings:
    """conf/attention: flash (our kernels), sdpa (torch's), standard (the S x S matrix, the paper's baseline)."""

    name: str = "flash"

    def check(self) -> None:
        one_of("attention", self.name, ATTENTIONS)


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
        if self.offload and self.checkpointing not in ("full", "auto"):
            raise UserError(
                f"memory.offload=true moves what memory=full keeps to host memory; memory={self.checkpointing} keeps "
                "other things: choose memory=full or memory=auto."
            )
        for name in ("ffn_chunk", "loss_chunk"):
            value = getattr(self, name)
            if value is not None:
                at_least(f"memory.{name}", value, 1)


@dataclass
class LoggerSettings:
    """conf/logger: every run writes metrics.csv; wandb adds Weights & Biases, online when a key is configured."""

    name: str = "wandb"
    project: str = "flashtrain"
    run_name: str | None = None
    group: str | None = None
    mode: str = "auto"

    def check(self) -> None:
        one_of("logger", self.name, LOGGERS)
        one_of("logger.mode", self.mode, ("auto", "online", "offline"))


@dataclass
class HardwareSettings:
    """conf/hardware: what to run on. `demo` auto trains a recipe's small demo where there is no GPU."""

    accelerator: str = "auto"
    precision: str | None = None
    peak_tflops: float | None = None
    demo: str = "auto"

    def check(self) -> None:
        one_of("hardware.accelerator", self.accelerator, ACCELERATORS)
        one_of("hardware.demo", self.demo, ("auto", "always", "never"))
        if self.precision is not None:
            one_of("hardware.precision", self.precision, PRECISIONS)
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise UserError(f"hardware.peak_tflops={self.peak_tflops} must be above 0 (TFLOP/s, dense).")


@dataclass
class GenerateSettings:
    """The sample that a run prints at its end, and what mode=generate writes."""

    tokens: int = 120
    temperature: float = 0.8
    top_k: int = 50

    def check(self) -> None:
        at_least("generate.tokens", self.tokens, 1)
        between("generate.temperature", self.temperature, 0, 1e6)
        at_least("generate.top_k", self.top_k, 1)
