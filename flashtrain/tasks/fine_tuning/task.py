"""Fine-tuning: a head on BERT that learns labels of texts or of their words, as a LightningModule.

N samples, L labels.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import BinaryF1Score

from flashtrain.models.bert_classifiers import SequenceClassifier, TokenClassifier
from flashtrain.tasks.training_task import TrainingTask
from flashtrain_kernels.loss_head import IGNORED

NUMBERS = ("real_tokens", "pairs", "sequences")  # a batch's plain numbers


class FineTuning(TrainingTask):
    """Trains a head and its encoder on batches of flashtrain.data.labelled_documents.

    `tokens_done` and `flops_done` count the real tokens and FLOPs of this device's training. Logs
    `train_loss`, `gradient_norm`, `validation_loss` (the mean over micro-batches), and the score
    over all held-out texts of all devices: `validation_micro_f1` for labels, else
    `validation_accuracy`; in testing `test_...` of these.

    Args:
        target: "labels" (any number of labels a text) or "class" (one a text), both with a
            SequenceClassifier; or "tokens" (a label for each word), with a TokenClassifier.
        compile: run the loss through torch.compile (one graph, static shapes).
        options: see TrainingTask.
    """

    def __init__(
        self,
        model: SequenceClassifier | TokenClassifier,
        target: str = "labels",
        *,
        compile: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.target = target
        self.tokens_done = 0
        self.flops_done = 0.0
        self._compile = compile
        self._loss: Any = model.loss
        # Over all samples and labels together; checking its arguments would wait for the device.
        self._score = BinaryF1Score(ignore_index=IGNORED, validate_args=False)

    @property
    def score_name(self) -> str:
        """The name of the score: "micro_f1" for target "labels", else "accuracy"."""
        return "micro_f1" if self.target == "labels" else "accuracy"

    def configure_model(self) -> None:
        """Compile the loss by torch.compile if `compile` is set; Lightning calls
        this before it trains."""
        super().configure_model()
        if self._compile:
            self._loss = torch.compile(cast(Any, self.model).loss, dynamic=False, fullgraph=True)

    def forward(self, tokens: Tensor, **layout: Any) -> Tensor:
        """Return logits: (N, L) of N texts or, from a TokenClassifier, the shape of
        `tokens` followed by L."""
        return self.model(tokens, **layout)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the micro-batch's mean loss; the mean over the optimizer step's
        micro-batches is logged."""
        self.tokens_done += batch.get("real_tokens", 0)
        encoder = cast(Any, self.model).encoder
        found = encoder.config.flops_of(batch.get("real_tokens", 0), batch.get("pairs", 0))
        frozen = not any(one.requires_grad for one in encoder.parameters())
        self.flops_done += found / 3 if frozen else found  # a frozen one has no backward
        loss = self._loss(**self._arguments(batch))
        step_loss = self.record_loss(loss, batch_idx)
        if step_loss is not None and self.is_logged_step():
            self.log("train_loss", step_loss, prog_bar=True, sync_dist=self.trainer.world_size > 1)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the micro-batch to the held-out loss and score."""
        self._evaluate("validation", batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a micro-batch of test texts to the test loss and score."""
        self._evaluate("test", batch)

    def _arguments(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the arguments of the model's loss; for target "class", `labels` are numbers of
        classes in place of (N, L) booleans."""
        found = {name: value for name, value in batch.items() if name not in NUMBERS}
        if self.target == "class":
            found["labels"] = found["labels"].argmax(-1)
        return found

    def _evaluate(self, name: str, batch: dict[str, Any]) -> None:
        arguments = self._arguments(batch)
        labels = arguments["labels"]
        loss = cast(Any, self.model).loss(**arguments)
        logits = self.model(**{key: value for key, value in arguments.items() if key != "labels"})
        if self.target == "labels":
            self._score.update(logits.sigmoid(), labels)
        else:
            # Of one class each, micro-F1 is the accuracy; torchmetrics' own waits for the
            # device at every batch.
            classes = logits.shape[-1]
            chosen = F.one_hot(logits.argmax(-1), classes)
            marks = F.one_hot(labels.clamp(min=0), classes).masked_fill(
                (labels == IGNORED)[..., None], IGNORED
            )
            self._score.update(chosen, marks)
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(labels))
        self.log(f"{name}_{self.score_name}", self._score, prog_bar=True, batch_size=len(labels))


def score_of(row: dict[str, Any]) -> str:
    """Return the score of a summary row in words, such as "micro-F1 0.871"."""
    if row.get("micro_f1") is not None:
        bound = ""
        if row.get("best_micro_f1") is not None:
            bound = f" (at most {row['best_micro_f1']:.3f} can be expected)"
        return f"micro-F1 {row['micro_f1']:.3f}{bound}"
    return "no score" if row.get("accuracy") is None else f"accuracy {row['accuracy']:.2%}"
