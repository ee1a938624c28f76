"""Settings of tasks whose samples have a fixed number of tokens, and settings of tasks that read
text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flashtrain.errors import UserError, at_least, between
from flashtrain.settings.data import DataSettings
from flashtrain.settings.settings import Settings


@dataclass(frozen=True)
class SequenceSharding:
    """How context parallelism shards each sequence over devices."""

    context: int  # tokens of a sequence
    degree: int  # devices that share it
    method: str  # trainer.context_parallel_method
    layout: str  # trainer.context_parallel_layout
    groups: str  # trainer.context_parallel_groups
    devices: int  # of one machine


@dataclass
class ContextSettings(Settings):
    """Settings of a task whose samples are `context` tokens long."""

    context: int = 1024  # tokens of a sample

    @property
    def samples_per_step(self) -> int:
        """The number of samples of an optimizer step, over all devices."""
        return self.trainer.tokens_per_step // self.context

    @property
    def sharding(self) -> SequenceSharding | None:
        """How each sequence is sharded over devices; None without context parallelism."""
        if not self.shares_sequences:
            return None
        given = self.trainer
        return SequenceSharding(
            self.context,
            self.context_degree,
            given.context_parallel_method,
            given.context_parallel_layout,
            given.context_parallel_groups,
            given.devices,
        )

    def check(self) -> None:
        at_least("context", self.context, 1)
        super().check()

    def check_step(self) -> None:
        """Raise UserError unless trainer.tokens_per_step is a whole number of samples that divides
        over devices and micro-batches.

        check() does not check this: without a GPU the recipe's demo may still replace these
        settings.
        """
        tokens, context = self.trainer.tokens_per_step, self.context
        if tokens % context:
            near = max(1, tokens // context) * context
            raise UserError(
                f"trainer.tokens_per_step={tokens} must be a multiple of context={context}. "
                f"Use {near}."
            )
        samples, ranks = self.samples_per_step, self.data_ranks
        groups = f"{ranks} groups of {self.context_degree} devices"
        if self.context_degree == 1:
            groups = f"{ranks} devices"
        if samples % ranks:
            raise UserError(
                f"a step of {samples} samples ({tokens} tokens / context {context}) does not "
                f"divide over {groups}. Set trainer.tokens_per_step to a multiple of "
                f"{context * ranks}, or split each sequence over devices: "
                f"context_parallel={self.trainer.devices}."
            )
        self.check_micro_batch(samples // ranks)


@dataclass
class TextSettings(ContextSettings):
    """Settings of a task that reads text."""

    data: DataSettings = field(default_factory=DataSettings)

    def kept_in_demo(self) -> set[str]:
        # The recipe's own text alone is replaced.
        kept = set() if self.data.source == "packages" else {"data.source"}
        # Which tokens a token file holds is no choice, and a vocabulary is named for its tokenizer.
        if self.data.source == "tokens" or self.data.vocab is not None:
            kept |= {"data.tokenizer", "data.vocab_size"}
        return kept

    def check(self) -> None:
        super().check()
        if self.mode in ("train", "plan"):  # mode=evaluate may score all of a text
            between("data.validation_fraction", self.data.validation_fraction, 0.0, 0.5)

    def check_files(self) -> None:
        """Raise UserError if a setting names a file that there is not."""
        for name in ("chat_template", "vocab", "merges"):
            given = getattr(self.data, name)
            if given is not None and not Path(given).expanduser().is_file():
                jinja = " of Jinja; without it the tokenizer's own is used" * (name[0] == "c")
                raise UserError(f"data.{name}={given}: expected the name of a file{jinja}.")
