"""Typed settings of every config group, checked before anything is built.

Hydra composes YAML; typed_settings() turns the result into these dataclasses. Below them flashtrain passes plain
arguments, so a setting's type, default and limits are decided here, in groups.py and in the settings.py of each task
alone. A None means "decided from the machine or the model when the run starts".
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from flashtrain.errors import UserError, at_least, between, first_line, one_of, unknown
from flashtrain.files.yaml_files import literal
from flashtrain.registry import component, registered
from flashtrain.settings.groups import (
    AttentionSettings,
    DataSettings,
    GenerateSettings,
    HardwareSettings,
    LoggerSettings,
    MaskSettings,
    MemorySettings,
    ModelSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainerSettings,
)

# What every task has; others are registered.
TASK_MODES = ("train", "plan", "evaluate", "generate", "export")
CONTEXT = "context"
LARGEST_SEED = 2**32 - 1  # of numpy's generators, which Lightning seeds
INTERNAL = ("is_demo",)  # settings that the command sets itself


@dataclass
class Settings:
    """Everything a run is told; tasks and experiments add groups of their own (settings_class).

    demo: dotted settings that replace a recipe's where there is no GPU. context_parallel: devices that share each
    sequence; above 1 it asks for trainer.strategy=context.
    """

    recipe: str = "gpt2"  # which file of recipes/, or of your own folders
    mode: str = "train"
    task: str = "language_model"
    context: int = 1024  # tokens a sample
    context_parallel: int | None = None
    seed: int = 0  # of the weights, the order of samples and dropout
    output: str = "runs"  # run folders are made below it
    resume: str | None = None  # null | auto | a run folder or checkpoint
    checkpoint: str | None = None  # for mode=evaluate, generate, export, passkey: a run folder or checkpoint
    weights: str | None = None
    export_precision: str = "float32"  # of mode=export's file of a classifier: float32 | float16
    target_accuracy: float | None = None  # of recipe=bert: stop at this held-out accuracy, and say how long it took
    prompt: str = ""  # for mode=generate, and the sample at a run's end
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    mask: MaskSettings = field(default_factory=MaskSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    demo: dict[str, Any] = field(default_factory=dict)
    is_demo: bool = False  # whether the demo was put in the recipe's place; the command sets it

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
    def within_documents(self) -> bool:
        """Whether a token sees nothing of other documents of its row."""
        return self.mask.name == "document" or self.mask.documents or self.data.document_mask

    @property
    def mask_label(self) -> str:
        """The mask in words, however it was asked for to stay within documents."""
        label = replace(self.mask, documents=self.within_documents).label
        return "document" if label == "causal within documents" else label

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
        between("seed", self.seed, 0, LARGEST_SEED)
        for one in fields(self):
            group = getattr(self, one.name)
            if is_dataclass(group):
                cast(Any, group).check()
        between("target_accuracy", self.target_accuracy, 0, 1, include_low=False)
        if self.optimizer.name == "lamb" and self.shards_weights:
            raise UserError("optimizer=lamb cannot train sharded weights: choose trainer.strategy=ddp, or adamw.")
        if self.optimizer.states == "host" and self.shards_weights:
            raise UserError(
                "optimizer.states=host is for weights that lie whole on a device; sharded ones are divided among all: "
                "choose trainer.strategy=ddp, or optimizer.states=8bit."
            )
        if self.hardware.precision == "64-true" and self.shards_weights:  # as Lightning has it
            raise UserError(
                f"hardware.precision=64-true needs whole weights on each device, and trainer.strategy={self.strategy} "
                "shards them: choose hardware.precision=32-true, or trainer.strategy=ddp."
            )
        if self.trainer.checkpoint == "sharded" and not self.shards_weights:
            raise UserError(
                f"trainer.checkpoint=sharded: with trainer.strategy={self.strategy} every device has the whole model. "
                "Possible: trainer.strategy=fsdp or context, or trainer.checkpoint=file."
            )
        if self.trainer.checkpoint == "sharded" and self.optimizer.states == "8bit":
            raise UserError(
                "trainer.checkpoint=sharded has no form for optimizer.states=8bit. Possible: trainer.checkpoint=file."
            )
        if self.model.quantize is not None and self.shards_weights:
            raise UserError(
                f"model.quantize={self.model.quantize} keeps whole weights on each device: choose trainer.strategy=ddp."
            )
        at_least("context_parallel", self.context_parallel, 1)
        if self.mode in ("train", "plan"):  # others may name it: their settings are those of a trained checkpoint
            check_context(self)
            between("data.validation_fraction", self.data.validation_fraction, 0.0, 0.5)

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


def strategy_of(settings: Settings) -> str:
    """trainer.strategy, or "context" where that is auto and context_parallel is above 1."""
    strategy = settings.trainer.strategy
    return CONTEXT if strategy == "auto" and (settings.context_parallel or 1) > 1 else strategy


def check_context(settings: Settings) -> None:
    """Raise UserError where a training asks for context parallelism and cannot have it."""
    degree, named = settings.context_parallel, settings.trainer.strategy
    if settings.strategy != CONTEXT:
        if degree is not None and degree > 1:
            raise UserError(
                f"context_parallel={degree} shares a sequence among devices, and trainer.strategy={named} gives each "
                "its own: choose trainer.strategy=context, or context_parallel=1."
            )
        way, layout = settings.trainer.context_way, settings.trainer.context_layout
        if degree is None and (way != "auto" or layout != "balanced"):
            given = f"context_way={way}" if way != "auto" else f"context_layout={layout}"
            raise UserError(
                f"trainer.{given} says how devices share a sequence, and each has its own: add context_parallel=2 (or "
                "more), or leave it out."
            )
        return
    _check_degree(settings)
    if settings.attention.name != "flash":
        raise UserError(
            f"attention={settings.attention.name} computes whole sequences on one device, and "
            f"{asked_to_share(settings)} computes flash attention over all: choose attention=flash."
        )
    if settings.trainer.cuda_graphs:
        raise UserError(
            f"trainer.cuda_graphs=true cannot record what devices send each other under {asked_to_share(settings)}: "
            "choose trainer.cuda_graphs=false."
        )


def _check_degree(settings: Settings) -> None:
    degree, ranks = settings.context_degree, settings.trainer.ranks
    if ranks % degree == 0:
        return
    fitting = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
    devices = f"{ranks} device{'' if ranks == 1 else 's'} (trainer.devices x trainer.nodes)"
    raise UserError(
        f"context_parallel={degree} does not divide {devices}: choose context_parallel={fitting}, or "
        f"trainer.devices={degree}."
    )


def asked_to_share(settings: Settings) -> str:
    """How context parallelism was asked for."""
    if settings.trainer.strategy == CONTEXT:
        return f"trainer.strategy={CONTEXT}"
    return f"context_parallel={settings.context_parallel}"


def mode_names() -> list[str]:
    """What mode= may be."""
    return [*TASK_MODES, *registered("mode")]


def divisors(number: int) -> list[int]:
    """The divisors of a positive whole number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def typed_settings(config: DictConfig) -> Settings:
    """The composed configuration as Settings, each value converted to its declared type.

    Raises UserError naming the setting for an unknown key or a value of the wrong type. Does not call check().
    """
    try:
        merged = OmegaConf.merge(_schema(), config)
        _check_lists(merged)
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise wrong_value(error) from error
    if not isinstance(settings, Settings):
        raise TypeError(f"expected Settings, built {type(settings).__name__}")
    return settings


KINDS = {"IntegerNode": "a whole number", "FloatNode": "a number", "BooleanNode": "true or false", "StringNode": "text"}
LISTS = {int: "a list of whole numbers: [1,2]", float: "a list of numbers: [0.1,0.2]", str: "a list: [one,another]"}


def _check_lists(config: Any, prefix: str = "") -> None:
    """UserError: a list of numbers or texts has a list or a mapping in it, which OmegaConf takes."""
    for name in map(str, config):
        node, key = config._get_node(name), f"{prefix}{name}"
        if isinstance(node, ListConfig) and node._metadata.element_type in LISTS and not node._is_none():
            if any(OmegaConf.is_config(node._get_node(place)) for place in range(len(node))):
                raise UserError(f"{key}={node}.{_possible(key)}")
        elif isinstance(node, DictConfig) and is_dataclass(node._metadata.object_type) and not node._is_none():
            _check_lists(node, f"{key}.")


def wrong_value(error: OmegaConfBaseException, key: str = "") -> UserError:
    """The error for a value that OmegaConf takes for no such setting. key: where that does not say which."""
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)) and error.full_key:
        return unknown_setting(str(error.full_key))
    key = str(error.full_key or key)
    possible = _possible(key) if isinstance(error, ValidationError) else ""
    said = first_line(error)
    if said.startswith("While dereferencing interpolation"):  # its value may be a password of the environment
        said = re.sub(r"Value '.*' of type", "what it stands for, of type", said)
    return UserError(f"{key or 'configuration'}: {said}.{possible}")


def _possible(key: str) -> str:
    """What the setting that this key names may be, as the end of a line; "" where that says nothing."""
    group, _, name = key.partition("[")[0].rpartition(".")  # of a list's entry the list
    beside = OmegaConf.select(_schema(), group) if group else _schema()
    node = beside._get_node(name) if isinstance(beside, DictConfig) and name in beside else None
    if isinstance(node, ListConfig):
        kind = LISTS.get(node._metadata.element_type)
    else:
        kind = KINDS.get(type(node).__name__)
    if kind is None or node is None:
        return ""
    return f" Possible: {kind}{', or null' if node._is_optional() else ''}."


def settings_config(settings: Settings) -> DictConfig:
    """Settings as a configuration that can be changed; `${...}` in a text is that text and asks for nothing."""
    config = OmegaConf.merge(_schema(), literal(asdict(settings)))
    if not isinstance(config, DictConfig):
        raise TypeError(f"expected a DictConfig, built {type(config).__name__}")
    return config


def unknown_setting(given: str) -> UserError:
    """The error for a setting that does not exist: near matches from all, a list of those beside it."""
    group, _, _ = given.rpartition(".")
    names = [name for name in setting_names() if name not in INTERNAL]
    if group.endswith(".options") and group in names:
        return UserError(f"{given} is an option of a registered component: add a plus, +{given}=...")
    while group and group not in {name.rpartition(".")[0] for name in names}:  # no group, or one inside a setting
        group = group.rpartition(".")[0]
    return unknown("setting", given, names, listed=[name for name in names if name.rpartition(".")[0] == group])


@cache
def setting_names() -> tuple[str, ...]:
    """Every dotted setting name, groups' own settings included."""
    return tuple(_dotted(_schema()))


@cache
def _schema() -> DictConfig:
    """The settings' types and defaults. Made once, since that takes long; merging copies it."""
    return OmegaConf.structured(settings_class())


def _dotted(config: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key in map(str, config):
        name = f"{prefix}{key}"
        names.append(name)
        if OmegaConf.is_dict(config._get_node(key)) and config[key]:
            names.extend(_dotted(config[key], f"{name}."))
    return names
