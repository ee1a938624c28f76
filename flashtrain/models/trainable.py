"""What a run asks of a model that it trains on text, whoever wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from flashtrain_kernels import Mask


class Trainable(nn.Module):
    """A module that tasks.LanguageModel can train. GPT2 is one; a model registered by a user's program is another.

    B batch, S sequence.
    """

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
