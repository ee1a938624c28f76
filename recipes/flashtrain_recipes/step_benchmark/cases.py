"""The cases of training steps: a model at a context, a batch size and a precision of weights.

B batch, S sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.settings.mask import MaskSettings
from flashtrain.settings.settings import Settings
from flashtrain.tasks.text_data import vocabulary_of
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.harness.rows import Row

MASTERS = "bf16-master"
NO_END = 1_000_000  # steps of the learning rate's schedule: more than are ever measured


class StepCase(ABC):
    """One model, context, batch and precision of weights, whose training step is
    measured. A base class."""

    model: Any  # its name
    context: Any  # tokens a sample
    batch: Any  # samples a step
    # "fp32" (autocast), "bf16" or "bf16-master" (with float32 copies that the optimizer updates).
    weights: Any

    @abstractmethod
    def draw(self, device: torch.device, seed: int) -> tuple[Any, ...]:
        """Return random samples and labels, the arguments of the loss, which the seed decides."""

    @abstractmethod
    def flops_per_token(self) -> float:
        """Return the model's FLOPs per token, forward and backward, without what a
        baseline computes in addition."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for two cases if they differ in context and batch only."""
        return (self.model, self.weights)

    @property
    def is_bfloat16(self) -> bool:
        """Whether the weights in matrix products are bfloat16."""
        return bool(self.weights != "fp32")

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer has float32 copies of bfloat16 weights."""
        return bool(self.weights == MASTERS)

    def settings_of(self, base: Settings) -> Settings:
        """Return a copy of the settings `base` that trains the case, with one
        micro-batch a step."""
        own = deepcopy(base)
        own.context, own.mask, own.data.document_mask = self.context, MaskSettings(), False
        own.trainer.micro_batch = self.batch
        own.trainer.tokens_per_step = self.batch * self.context * own.data_ranks
        own.trainer.steps = NO_END
        own.optimizer.master_weights = self.weights != "bf16"
        return own

    def hardware_of(self, machine: Hardware) -> Hardware:
        """Return a copy of `machine` with the precision that the case trains in, which follows from
        the dtype of its weights."""
        mixed = "bf16-mixed" if machine.kind == "cuda" else "32-true"
        return replace(machine, precision="bf16-true" if self.is_bfloat16 else mixed)

    def columns(self) -> Row:
        return {
            "model": self.model,
            "context": self.context,
            "batch": self.batch,
            "weights": self.weights,
        }

    def rates(self, milliseconds: float, peak_flops: float | None) -> Row:
        """Return the columns tokens_per_second and mfu of a step that takes so many milliseconds.

        Args:
            peak_flops: the device's dense peak in FLOP/s; None: unknown, and mfu is None.
        """
        rate = self.batch * self.context / milliseconds * 1e3
        mfu = None if peak_flops is None else round(rate * self.flops_per_token() / peak_flops, 4)
        return {"tokens_per_second": round(rate, 1), "mfu": mfu}

    def needs_memory_of(self, other: StepCase) -> bool:
        """Return whether the case needs at least as much memory as the other."""
        # activations grow with the tokens, the S x S matrix with tokens times context
        longer = (
            self.context >= other.context
            and self.batch * self.context >= other.batch * other.context
        )
        return bool(self.kind == other.kind and longer)

    def __str__(self) -> str:
        return f"{self.model} S={self.context} weights {self.weights} batch {self.batch}"


def draw_tokens(
    vocab_size: int, batch: int, context: int, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    """Return random tokens and labels, each (B, S) int64; labels[b, s] is the
    token after tokens[b, s]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocab_size, (batch, context + 1), generator=generator).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def batches_of(options: Any, context: int) -> list[int]:
    """Return benchmark.batches, or the one batch size, 1 or more, that holds
    benchmark.tokens at this context."""
    return sorted(set(options.batches)) if options.batches else [max(1, options.tokens // context)]


@dataclass(frozen=True)
class GPT2Case(StepCase):
    """A GPT-2 of one size, whose training step is measured."""

    model: str  # a name of models.SIZES
    context: int
    batch: int
    weights: str
    vocab_size: int
    # Of every baseline's embedding table; None: vocab_size rounded up to 64.
    vocab_rows: int | None = None

    def config(self) -> DecoderConfig:
        """Return the model configuration that every baseline builds."""
        return DecoderConfig.of_size(
            self.model, vocab_size=self.vocab_size, context=self.context, vocab_rows=self.vocab_rows
        )

    def draw(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        return draw_tokens(self.vocab_size, self.batch, self.context, device, seed)

    def flops_per_token(self) -> float:
        with torch.device("meta"):
            return Decoder(self.config(), attention="sdpa").flops_per_token(self.context)


def cases(settings: Settings) -> list[GPT2Case]:
    """Return a case for every requested model, context, batch and precision. Raises
    UserError for a model other than gpt2."""
    if settings.model.name != "gpt2":
        raise UserError(
            f"model={settings.model.name}: "
            "expected model=gpt2, the only model that all implementations have."
        )
    options = settings.benchmark
    vocab_size = vocabulary_of(settings.data)
    return [
        GPT2Case(model, context, batch, weights, vocab_size, settings.model.vocab_rows)
        for model in options.models
        for weights in options.weights
        for context in options.contexts
        for batch in batches_of(options, context)
    ]
