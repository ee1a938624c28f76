"""Typed settings of every config group, checked before anything is built.

Hydra composes YAML; typed_settings.py turns the result into these dataclasses. Below them flashtrain passes plain
arguments, so a setting's type, default and limits are decided here alone (groups of their own: trainer_settings.py and
the settings.py of each task). A None means "decided from the machine or the model when the run starts".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flashtrain.data.text_encoding import UTF_8, check_encoding
from flashtrain.errors import UserError
from flashtrain.files.compressed import DEFAULT_LONGEST
from flashtrain.registry import component, registered
from flashtrain.settings.context_settings import CONTEXT, asked_to_share, check_context, strategy_of
from flashtrain.settings.setting_checks import at_least, between, one_of
from flashtrain.settings.trainer_settings import OptimizerSettings, ScheduleSettings, TrainerSettings

# What every task has; others are registered.
TASK_MODES = ("train", "plan", "evaluate", "generate", "export")
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


@dataclass
class Settings:
    """Everything a run is told; tasks and experiments add groups of their own (settings_class).

    demo: dotted settings that replace a recipe's where there is no GPU. context_parallel: devices that share each
    sequence; above 1 it asks for trainer.strategy=context.
    """

    recipe: str = "gpt2"
    mode: str = "train"
    task: str = "language_model"
    context: int = 1024
    context_parallel: int | None = None
    seed: int = 0
    output: str = "runs"
    resume: str | None = None
    checkpoint: str | None = None
    weights: str | None = None
    export_precision: str = "float32"
    target_accuracy: float | None = None
    prompt: str = ""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    demo: dict[str, Any] = field(default_factory=dict)
    is_demo: bool = False

    def __new__(cls, *_: Any, **__: Any) -> Settings:
        """Settings() has the registered groups too."""
        return object.__new__(settings_class() if cls is Settings else cls)

    if TYPE_CHECKING:  # the groups that settings_class() adds

        def __getattr__(self, name: str) -> Any: ...

    def having(self, **values: Any) -> Settings:
        """The same settings with these values, of any group."""
        return replace(cast(Any, self), **values)

    def named(self, label: str) -> str:
        """The model in a word: its label, or the folder's name where training starts from given weights."""
        return label if self.weights is None else Path(self.weights).name

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimiser step, over all devices."""
        return self.trainer.tokens_per_step // self.context

    @property
    def strategy(self) -> str:
        """trainer.strategy, or "context" where that is auto and context_parallel asks for it."""
        return strategy_of(self)

    @property
    def shards_weights(self) -> bool:
        """Whether the strategy divides weights, gradients and optimiser states among the devices."""
        return self.strategy in ("fsdp", CONTEXT)

    @property
    def shares_sequences(self) -> bool:
        """Whether devices share each sequence."""
        return self.strategy == CONTEXT

    @property
    def asked_to_share(self) -> str:
        """How that was asked for, as a setting."""
        return asked_to_share(self)

    @property
    def context_degree(self) -> int:
        """Devices that share a sequence; 1 where each has its own."""
        if self.strategy != CONTEXT:
            return 1
        return self.context_parallel or self.trainer.ranks

    @property
    def data_ranks(self) -> int:
        """Groups of devices that read different samples."""
        return self.trainer.ranks // self.context_degree

    def check(self) -> None:
        """Raise UserError for the first setting that cannot work, alone or with another."""
        one_of("mode", self.mode, mode_names())
        one_of("task", self.task, registered("task"))
        one_of("export_precision", self.export_precision, ("float32", "float16"))
        at_least("context", self.context, 1)
        at_least("seed", self.seed, 0)
        for one in fields(self):
            group = getattr(self, one.name)
            if is_dataclass(group):
                cast(Any, group).check()
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise UserError(f"target_accuracy={self.target_accuracy} must be above 0, and at most 1.")
        if self.optimizer.name == "lamb" and self.shards_weights:
            raise UserError("optimizer=lamb cannot train sharded weights: choose trainer.strategy=ddp, or adamw.")
        if self.context_parallel is not None:
            at_least("context_parallel", self.context_parallel, 1)
        if self.mode in ("train", "plan"):  # others may name it: their settings are those of a trained checkpoint
            check_context(self)

    def check_step(self) -> None:
        """Raise UserError unless a step is whole samples that divide over devices and micro-batches.

        Of language models: other tasks check their own steps. Apart from check(), since a machine without a GPU may put
        the recipe's demo in these settings' place first.
        """
        tokens, context = self.trainer.tokens_per_step, self.context
        if tokens % context:
            near = max(1, tokens // context) * context
            raise UserError(
                f"trainer.tokens_per_step={tokens} is no multiple of context={context}: "
                f"a step is whole samples; {near} would do."
            )
        samples, ranks = self.samples_per_step, self.data_ranks
        groups = f"{ranks} devices" if self.context_degree == 1 else f"{ranks} groups of {self.context_degree} devices"
        if samples % ranks:
            raise UserError(
                f"a step of {samples} samples ({tokens} tokens / context {context}) does not divide over {groups}: "
                f"raise trainer.tokens_per_step to a multiple of {context * ranks}."
            )
        micro = self.trainer.micro_batch
        if micro is not None and (samples // ranks) % micro:
            raise UserError(
                f"trainer.micro_batch={micro} does not divide the {samples // ranks} samples a "
                f"{'device' if self.context_degree == 1 else 'group of devices'} takes a step: "
                f"choose one of {', '.join(map(str, divisors(samples // ranks)))}."
            )


@cache
def settings_class() -> type[Settings]:
    """Settings with the groups that tasks and experiments register (`settings.NAME`), in their order.

    Raises UserError where one has the name of a setting of all runs.
    """
    names = registered("settings")
    taken = [name for name in names if name in {one.name for one in fields(Settings)}]
    if taken:
        raise UserError(f"settings '{taken[0]}' are registered, and every run has settings of that name: rename them.")
    groups = [(name, component("settings", name)) for name in names]
    made = [(name, group, field(default_factory=group)) for name, group in groups]
    whole = make_dataclass("Settings", made, bases=(Settings,))
    whole.__module__, whole.__doc__ = __name__, Settings.__doc__
    return whole


def mode_names() -> list[str]:
    """What mode= may be."""
    return [*TASK_MODES, *registered("mode")]


def divisors(number: int) -> list[int]:
    """The divisors of a positive whole number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
