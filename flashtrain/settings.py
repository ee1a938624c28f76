"""Typed settings of every config group, checked before anything is built.

Hydra composes YAML; `typed_settings` turns the result into these dataclasses. Below this file flashtrain passes plain
arguments, so this is the one place where a setting's type, default and limits are decided. A None means "decided from
the machine or the model when the run starts".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from flashtrain.benchmarks.settings import BenchmarkSettings
from flashtrain.classification.settings import (
    ClassifierSettings,
    CurriculumSettings,
    MaskedPixelSettings,
    SequenceSettings,
)
from flashtrain.data.pathfinder.settings import PathfinderSettings
from flashtrain.errors import UserError, unknown
from flashtrain.fine_tuning.settings import FineTuningSettings
from flashtrain.long_context.settings import LengthsSettings, PasskeySettings
from flashtrain.masked_text.settings import BertSettings, MaskedSettings
from flashtrain.setting_checks import at_least, between, one_of

MODES = ("train", "plan", "evaluate", "generate", "export", "benchmark", "lengths", "passkey", "preview")
TASKS = (
    "language_model",
    "classification",
    "masked_language_model",
    "fine_tuning",
)  # a recipe sets it; flashtrain.task_runs says who trains each
ATTENTIONS = ("flash", "sdpa", "standard")
STRATEGIES = ("auto", "ddp", "fsdp")
ACCELERATORS = ("auto", "cpu", "gpu")
PRECISIONS = ("bf16-mixed", "16-mixed", "32-true", "bf16-true", "64-true")
TOKENIZERS = ("bytes", "bpe", "gpt2")
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
    residual: str = "weights"
    options: dict[str, Any] = field(default_factory=dict)

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

    split_context: hold out as for samples of this length (None: `context`): see TextDataModule.
    """

    source: str = "stdlib"
    path: str | None = None
    name: str | None = None
    config: str | None = None
    split: str = "train"
    text_column: str = "text"
    streaming: bool = True
    include_tests: bool = True
    tokenizer: str = "bpe"
    vocab_size: int = 50257
    vocab: str | None = None
    merges: str | None = None
    document_mask: bool = False
    validation_fraction: float = 0.02
    validation_tokens: int = 524288
    split_context: int | None = None
    workers: int | None = None
    cache_dir: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if self.source == "files" and not self.path:
            raise UserError("data=files needs data.path=..., a file or folder of .txt, .md, .jsonl or .parquet.")
        if self.source == "hub" and not self.name:
            raise UserError(
                "data=hub needs data.name=..., a dataset of the Hugging Face hub such as roneneldan/TinyStories."
            )
        one_of("data.tokenizer", self.tokenizer, TOKENIZERS)
        at_least("data.vocab_size", self.vocab_size, 257)
        if (self.vocab is None) != (self.merges is None):
            raise UserError("data.vocab and data.merges belong together: give both files, or neither to use the hub's.")
        between("data.validation_fraction", self.validation_fraction, 0.0, 0.5)
        at_least("data.validation_tokens", self.validation_tokens, 1)
        if self.split_context is not None:
            at_least("data.split_context", self.split_context, 1)
        if self.workers is not None:
            at_least("data.workers", self.workers, 0)


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
class OptimizerSettings:
    """conf/optimizer. `gradient_clip` bounds the global L2 norm of the gradients; 0 leaves them as they are.

    `momentum` is muon's. `master_weights`: a float32 copy of weights that hardware.precision=bf16-true makes bfloat16.
    """

    name: str = "adamw"
    learning_rate: float = 6e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    momentum: float = 0.95
    master_weights: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if not self.learning_rate > 0:
            raise UserError(f"optimizer.learning_rate={self.learning_rate} must be above 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1).")
        at_least("optimizer.epsilon", self.epsilon, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.gradient_clip", self.gradient_clip, 0)
        between("optimizer.momentum", self.momentum, 0.0, 1.0, include_high=False)


@dataclass
class ScheduleSettings:
    """conf/schedule: the learning rate's course. `warmup_steps` None means 5% of the steps, at least one."""

    name: str = "cosine"
    warmup_steps: int | None = None
    minimum_ratio: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if self.warmup_steps is not None:
            at_least("schedule.warmup_steps", self.warmup_steps, 0)
        between("schedule.minimum_ratio", self.minimum_ratio, 0.0, 1.0)


@dataclass
class TrainerSettings:
    """conf/trainer: how long, how much a step, on how many devices, and how often to log, validate and save.

    max_minutes: after so long (from the command's start) the run writes its checkpoint and ends; resume=auto goes on.
    """

    steps: int = 500
    tokens_per_step: int = 65536
    micro_batch: int | None = None
    devices: int = 1
    nodes: int = 1
    strategy: str = "auto"
    compile: bool | None = None
    cuda_graphs: bool = False
    log_every: int = 10
    validate_every: int = 100
    checkpoint_every: int = 100
    max_minutes: float | None = None
    callbacks: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Processes over all nodes, one a device."""
        return self.devices * self.nodes

    def check(self) -> None:
        for name in ("steps", "tokens_per_step", "devices", "nodes", "log_every", "validate_every", "checkpoint_every"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        if self.micro_batch is not None:
            at_least("trainer.micro_batch", self.micro_batch, 1)
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise UserError(f"trainer.max_minutes={self.max_minutes} must be above 0.")
        one_of("trainer.strategy", self.strategy, STRATEGIES)


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
        at_least("generate.temperature", self.temperature, 0)
        at_least("generate.top_k", self.top_k, 1)


@dataclass
class Settings:
    """Everything one run is told. `demo` holds dotted settings that replace a recipe's where there is no GPU."""

    recipe: str = "gpt2"
    mode: str = "train"
    task: str = "language_model"
    context: int = 1024
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
    benchmark: BenchmarkSettings = field(default_factory=BenchmarkSettings)
    lengths: LengthsSettings = field(default_factory=LengthsSettings)
    passkey: PasskeySettings = field(default_factory=PasskeySettings)
    pathfinder: PathfinderSettings = field(default_factory=PathfinderSettings)
    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    sequence: SequenceSettings = field(default_factory=SequenceSettings)
    masked_pixels: MaskedPixelSettings = field(default_factory=MaskedPixelSettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    bert: BertSettings = field(default_factory=BertSettings)
    masked: MaskedSettings = field(default_factory=MaskedSettings)
    finetune: FineTuningSettings = field(default_factory=FineTuningSettings)
    demo: dict[str, Any] = field(default_factory=dict)
    is_demo: bool = False

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimiser step, over all devices."""
        return self.trainer.tokens_per_step // self.context

    def check(self) -> None:
        """Raise UserError for the first setting that cannot work, alone or with another."""
        one_of("mode", self.mode, MODES)
        one_of("task", self.task, TASKS)
        one_of("export_precision", self.export_precision, ("float32", "float16"))
        at_least("context", self.context, 1)
        at_least("seed", self.seed, 0)
        groups = (self.model, self.data, self.attention, self.optimizer, self.schedule, self.trainer, self.logger)
        measured = (self.generate, self.benchmark, self.lengths, self.passkey, self.pathfinder)
        classified = (self.classifier, self.sequence, self.masked_pixels, self.curriculum)
        encoders = (self.bert, self.masked, self.finetune)
        for group in (*groups, self.memory, self.hardware, *measured, *classified, *encoders):
            group.check()
        if self.target_accuracy is not None:
            if not 0 < self.target_accuracy <= 1:
                raise UserError(f"target_accuracy={self.target_accuracy} must be above 0, and at most 1.")
            if self.task != "masked_language_model":
                raise UserError(f"target_accuracy is of recipe=bert: recipe={self.recipe} has no such accuracy.")
        if self.optimizer.name == "lamb" and self.trainer.strategy == "fsdp":
            raise UserError("optimizer=lamb cannot train sharded weights: choose trainer.strategy=ddp, or adamw.")
        self._check_mode()

    def _check_mode(self) -> None:
        """Raise UserError where the mode and the recipe do not go together: some recipes train, others measure."""
        if self.mode == "lengths" and not self.lengths.contexts:
            raise UserError(
                f"mode=lengths trains each of lengths.contexts, which recipe={self.recipe} does not name: "
                "add lengths.contexts=[1024,2048], or take recipe=gpt2-long."
            )
        if self.mode == "benchmark" and self.benchmark.name is None:
            raise UserError(
                f"mode=benchmark: recipe={self.recipe} trains a model; recipe=attention-benchmark measures."
            )
        if self.benchmark.name is not None and self.mode not in ("benchmark", "plan"):
            raise UserError(
                f"recipe={self.recipe} measures and trains nothing: mode={self.mode} must be benchmark or plan."
            )

    def check_step(self) -> None:
        """Raise UserError unless a step is whole samples that divide over devices and micro-batches.

        Of language models: classification, masked_text and fine_tuning check their own steps. Apart from check(), since
        a machine without a GPU may put the recipe's demo in these settings' place first.
        """
        tokens, context = self.trainer.tokens_per_step, self.context
        if tokens % context:
            near = max(1, tokens // context) * context
            raise UserError(
                f"trainer.tokens_per_step={tokens} is no multiple of context={context}: "
                f"a step is whole samples; {near} would do."
            )
        samples, ranks = self.samples_per_step, self.trainer.ranks
        if samples % ranks:
            raise UserError(
                f"a step of {samples} samples ({tokens} tokens / context {context}) does not divide over {ranks} "
                f"devices: raise trainer.tokens_per_step to a multiple of {context * ranks}."
            )
        micro = self.trainer.micro_batch
        if micro is not None and (samples // ranks) % micro:
            raise UserError(
                f"trainer.micro_batch={micro} does not divide the {samples // ranks} samples a device takes a step: "
                f"choose one of {', '.join(map(str, divisors(samples // ranks)))}."
            )


def typed_settings(config: DictConfig) -> Settings:
    """The composed configuration as Settings, each value converted to its declared type.

    Raises UserError naming the setting for an unknown key or a value of the wrong type. Does not call check().
    """
    schema = OmegaConf.structured(Settings)
    try:
        merged = OmegaConf.merge(schema, config)
        settings = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise unknown_setting(str(error.full_key)) from error
    except ValidationError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{error.full_key}: {reason}.") from error
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {str(error).splitlines()[0]}.") from error
    if not isinstance(settings, Settings):
        raise TypeError(f"expected Settings, built {type(settings).__name__}")
    return settings


def unknown_setting(given: str) -> UserError:
    """The error for a setting that does not exist: near matches from all, a list of those beside it."""
    group, _, _ = given.rpartition(".")
    names = setting_names()
    if group.endswith(".options") and group in names:
        return UserError(f"{given} is an option of a registered component: add a plus, +{given}=...")
    depth = group.count(".") + 1 if group in names else 0
    beside = [name for name in names if name.count(".") == depth and (depth == 0 or name.startswith(f"{group}."))]
    return unknown("setting", given, names, listed=beside)


def setting_names() -> list[str]:
    """Every dotted setting name, groups' own settings included."""
    return _dotted(OmegaConf.structured(Settings))


def divisors(number: int) -> list[int]:
    """The divisors of a positive whole number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _dotted(config: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key in map(str, config):
        name = f"{prefix}{key}"
        names.append(name)
        if OmegaConf.is_dict(config._get_node(key)) and config[key]:
            names.extend(_dotted(config[key], f"{name}."))
    return names
