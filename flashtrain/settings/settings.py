"""The settings that every run has; each task derives a dataclass that adds its own settings.

Hydra composes YAML; schema.py turns the result into the dataclass of the task. Models, data and
training take plain arguments, so a setting's type, default and limits are decided in this
folder and in the settings.py of each task alone. A None means "decided from the machine or the
model when the run starts".
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flashtrain.errors import UserError, between, one_of
from flashtrain.registry import registered
from flashtrain.settings.logger import LoggerSettings
from flashtrain.settings.machine import AttentionSettings, HardwareSettings, MemorySettings
from flashtrain.settings.options import check_options
from flashtrain.settings.training import OptimizerSettings, ScheduleSettings, TrainerSettings

OF_A_CHECKPOINT = ("evaluate", "generate", "export")
TASK_MODES = ("train", "plan", *OF_A_CHECKPOINT)  # what a task may have; others are registered
CONTEXT = "context_parallel"
MAX_SEED = 2**32 - 1  # of numpy's generators, which Lightning seeds


@dataclass
class Settings:
    """All settings of a run that every task has."""

    # The file of recipes/, or of a folder of your own, whose settings are the run's.
    recipe: str = "gpt2"
    # What the command does: train, plan, evaluate, generate, export, or a mode of the
    # recipes, which --help lists.
    mode: str = "train"
    task: str = "language_model"  # what is trained: a registered task, which the recipe sets
    seed: int = 0  # the seed of random weights, of the order of samples and of dropout
    output: str = "runs"  # the folder in which run folders are made
    # The run to go on with: auto (the newest unfinished one of the same settings), a run's
    # folder, or a checkpoint.
    resume: str | None = None
    # The run folder or checkpoint that mode=evaluate, generate, export ... load.
    checkpoint: str | None = None
    # What to start from: a run, an export, a checkpoint, or a folder of transformers.
    weights: str | None = None
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    hardware: HardwareSettings = field(default_factory=HardwareSettings)
    # settings that replace the recipe's where there is no GPU.
    demo: dict[str, Any] = field(default_factory=dict)
    is_demo: bool = False  # whether the demo's settings replaced the recipe's; the command sets it

    if TYPE_CHECKING:  # what a task, a mode or a program adds (schema.py)

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def having(self, **values: Any) -> Settings:
        """Return a copy of the settings in which these groups or settings are replaced."""
        return replace(cast(Any, self), **values)

    def kept_in_demo(self) -> set[str]:
        """Return the dotted names of settings that the recipe's demo does not replace."""
        return set()

    def named(self, label: str) -> str:
        """Return a short name of the model: the file or folder name of `weights`, or `label` if
        those are not given, or a checkpoint."""
        path = Path(self.weights or ".ckpt")
        return label if path.name.endswith(".ckpt") else path.name

    @property
    def strategy(self) -> str:
        """The training strategy: trainer.strategy or, if that is auto, the one that a task's other
        settings choose."""
        return self.trainer.strategy

    @property
    def shards_weights(self) -> bool:
        """Whether the strategy shards weights, gradients and optimizer states over the devices."""
        return self.strategy in ("fsdp", CONTEXT)

    @property
    def shares_sequences(self) -> bool:
        """Whether each sequence is sharded over several devices (context parallelism)."""
        return self.strategy == CONTEXT

    @property
    def context_degree(self) -> int:
        """The number of devices over which a sequence is sharded; 1 without context parallelism."""
        return 1

    @property
    def data_ranks(self) -> int:
        """The number of data-parallel ranks, which read different samples; the devices that share a
        sequence are one rank."""
        return self.trainer.ranks // self.context_degree

    def check_share(self, setting: str, samples: int) -> None:
        """Raise UserError unless the `samples` of a step divide over devices and micro-batches;
        `setting` is the name of the setting that gives their number."""
        share, rest = divmod(samples, self.data_ranks)
        if rest:
            raise UserError(
                f"a step of {setting}={samples} does not divide over {self.data_ranks} devices. "
                f"Use a multiple of {self.data_ranks}."
            )
        self.check_micro_batch(share)

    def check_micro_batch(self, share: int) -> None:
        """Raise UserError unless trainer.micro_batch divides `share`, the samples of a step on one
        device."""
        micro = self.trainer.micro_batch
        if micro is not None and share % micro:
            device = "device" if self.context_degree == 1 else "group of devices"
            raise UserError(
                f"trainer.micro_batch={micro} does not divide the {share} samples a {device} takes "
                f"a step. Expected one of {', '.join(map(str, divisors(share)))}."
            )

    def check_inputs(self) -> None:
        """Raise UserError if a training lacks settings that only the user can give, such as a model
        or data; it names all of them."""

    def check(self) -> None:
        """Raise UserError for the first setting that cannot work, alone or with another."""
        one_of("mode", self.mode, mode_names())
        between("seed", self.seed, 0, MAX_SEED)
        for one in fields(self):
            group = getattr(self, one.name)
            if is_dataclass(group):
                check_options(one.name, group)
                if hasattr(group, "check"):
                    cast(Any, group).check()
        if self.hardware.plan_for is not None and self.mode != "plan":
            raise UserError(
                f"hardware.plan_for={self.hardware.plan_for} is used by mode=plan alone. "
                "Add mode=plan."
            )
        if self.optimizer.name == "lamb" and self.shards_weights:
            raise UserError(
                "optimizer=lamb cannot train sharded weights. "
                "Use trainer.strategy=ddp or optimizer=adamw."
            )
        if self.optimizer.states == "host" and self.shards_weights:
            raise UserError(
                "optimizer.states=host needs whole weights on each device, and "
                f"trainer.strategy={self.strategy} shards them. Use trainer.strategy=ddp, or "
                "optimizer.states=8bit."
            )
        if self.hardware.precision == "64-true" and self.shards_weights:  # as Lightning has it
            raise UserError(
                "hardware.precision=64-true needs whole weights on each device, and "
                f"trainer.strategy={self.strategy} shards them. Use hardware.precision=32-true, or "
                "trainer.strategy=ddp."
            )
        if self.trainer.checkpoint_format == "sharded" and not self.shards_weights:
            raise UserError(
                "trainer.checkpoint_format=sharded needs sharded weights, and "
                f"trainer.strategy={self.strategy} has none. Use trainer.strategy=fsdp or "
                "context_parallel, or trainer.checkpoint_format=file."
            )
        if self.trainer.checkpoint_format == "sharded" and self.optimizer.states == "8bit":
            raise UserError(
                "trainer.checkpoint_format=sharded does not support optimizer.states=8bit. "
                "Use trainer.checkpoint_format=file."
            )


def mode_names() -> list[str]:
    """Return the values that `mode` may have: the tasks' modes, then the registered ones."""
    return [*TASK_MODES, *registered("mode")]


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive whole number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
