"""The prediction of masked tokens, as a LightningModule around BERT."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flashtrain.data.masking import MaskedBatch, loss_arguments, score_arguments
from flashtrain.models.bert import Bert, MaskedScore
from flashtrain.tasks.language.task import LanguageModel
from flashtrain.tasks.training_task import replayed


class MaskedLanguageModel(LanguageModel):
    """Trains a BERT on batches of masked samples
    (flashtrain.data.masking.MaskedBatch), packed or padded.

    Logs `train_loss`, the mean over the labels of a step, `gradient_norm` (before clipping), and
    over the whole held-out set `validation_loss`, in nats a label, and `validation_accuracy`: the
    share of masked positions at which the original token has the highest score, which is MLPerf's
    masked-language accuracy.

    Args:
        model: a Bert, or a module with its `.loss` and `.score`.
        options: see LanguageModel; document_mask is not needed, since samples
            never attend to each other.
    """

    def __init__(self, model: Bert, **options: Any) -> None:
        super().__init__(model, **options)
        self.flops_done = 0.0
        self.tokens_done = 0
        self.sequences_done = 0
        self._step_work: list[tuple[int, int, float]] = []
        self._scores: list[MaskedScore] = []

    @property
    def bert(self) -> Bert:
        """The model, typed as a Bert."""
        return cast(Bert, self.model)

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Return the logits of every token; the arguments are those of Bert.forward."""
        return self.bert(tokens, **layout)

    def batch_loss(self, batch: MaskedBatch) -> Tensor:  # type: ignore[override]
        """Return the micro-batch's contribution to the step's mean loss in nats, differentiable."""
        arguments = loss_arguments(batch)
        loss = self._compiled or self.loss
        return replayed(loss, **arguments) if self._replays else loss(**arguments)

    def training_step(self, batch: MaskedBatch, batch_idx: int) -> Tensor:  # type: ignore[override]
        """Return the micro-batch's loss, and count this device's tokens (without
        padding), sequences and FLOPs."""
        tokens, sequences = batch["real_tokens"], batch["sequences"]
        flops = self.bert.config.flops_of(tokens, batch["pairs"], batch["scored"])
        self._step_work.append((tokens, sequences, flops))
        return super().training_step(cast(Any, batch), batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the step's tokens, sequences and FLOPs to the totals, now and not before, so that a
        step that fails adds nothing."""
        for tokens, sequences, flops in self._step_work:
            self.tokens_done += tokens
            self.sequences_done += sequences
            self.flops_done += flops
        self._step_work.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what every task saves, and the totals of tokens, sequences and FLOPs of the device
        that writes the checkpoint."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["done"] = [self.tokens_done, self.sequences_done, self.flops_done]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what on_save_checkpoint saved."""
        super().on_load_checkpoint(checkpoint)
        if "done" in checkpoint:
            self.tokens_done, self.sequences_done, self.flops_done = checkpoint["done"]

    def validation_step(self, batch: MaskedBatch, batch_idx: int) -> None:  # type: ignore[override]
        """Add the micro-batch's loss, correct predictions and number of
        labels to the held-out sums."""
        self._scores.append(self.bert.score(**score_arguments(batch)))

    def on_validation_epoch_end(self) -> None:
        """Log loss and accuracy over all held-out labels of all devices."""
        if not self._scores:
            return
        sums = torch.stack(
            [torch.stack([part.double() for part in score]) for score in self._scores]
        ).sum(0)
        sums = cast(Tensor, self.trainer.strategy.reduce(sums, reduce_op="sum"))
        loss, correct, labels = sums.tolist()
        self._scores.clear()
        if labels:
            self.log("validation_loss", loss / labels, prog_bar=True)
            self.log("validation_accuracy", correct / labels, prog_bar=True)
