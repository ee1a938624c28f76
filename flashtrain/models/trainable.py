"""What a run asks of a model that it trains on text, whoever wrote it, and what the model may offer beside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.memory_savings import MemorySavings

if TYPE_CHECKING:
    from flashtrain.models.cache import KeyValueCache
    from flashtrain_kernels import Mask


class DecoderShape(Protocol):
    """What a decoder's memory, and what its devices send each other, are estimated from. GPT2Config is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab_rows(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def positions(self) -> str: ...
    @property
    def head_dim(self) -> int: ...


class Trainable(nn.Module):
    """A module that tasks.LanguageModel can train. GPT2 is one; a model registered by a user's program is another.

    loss, parameter_count and flops_per_token are needed. What stands below them is offered by a model that has it: its
    run then chooses micro-batch and memory savings by itself, compiles block by block, and shows a sample.
    B batch, S sequence.
    """

    residual: str = "weights"  # what the sum of all branches is kept in under autocast: see GPT2

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats, a float32 scalar, over the labels (B, S) that are not -100.

        tokens (B, S). positions: (B, S), where each token stands in its document; None: 0, 1, ... mask: which tokens
        each token sees, in place of the model's own rule; it lies on the tokens' device and has no plan yet.
        """
        raise NotImplementedError

    def parameter_count(self) -> int:
        """Parameters, each counted once."""
        raise NotImplementedError

    def flops_per_token(self, context: int | None = None) -> float:
        """Model FLOPs of one token's forward and backward at this context, for TFLOP/s and MFU."""
        raise NotImplementedError

    @property
    def shape(self) -> DecoderShape | None:
        """By which its memory is estimated; None where that is not known."""
        return None

    def save_memory(self, savings: MemorySavings) -> None:
        """Train with less memory for activations from now on. UserError: savings that the model has not."""
        if savings != MemorySavings():
            raise UserError(f"{type(self).__name__} has no memory savings. Possible: memory=none.")

    def compile_blocks(self, **options: Any) -> bool:
        """Compile each block by itself with torch.compile's options. False where there are no blocks to compile."""
        return False

    @property
    def recomputes_blocks(self) -> bool:
        """Whether whole blocks are computed again in the backward, between which no compiled graph may reach."""
        return False

    @property
    def generates(self) -> bool:
        """Whether it writes text: new_cache, and a forward that takes `cache` and `last_only`, as GPT2's does."""
        return False

    def new_cache(self, tokens: int | None = None) -> KeyValueCache:
        """An empty cache of keys and values for so many tokens (None: its context)."""
        raise NotImplementedError

    def untrained(self) -> Trainable:
        """A model of the same shape and options with random weights, for weights that were gathered."""
        raise NotImplementedError
