"""Classification of whole sequences, as a LightningModule around a Classifier.

B samples, S tokens or pixels of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtrain.data.sequences import SequenceBatch
from flashtrain.errors import above
from flashtrain.models.classifier import Classifier, Losses
from flashtrain.models.pixel_selection import pixels_to_mask, pixels_to_read
from flashtrain.tasks.training_task import TrainingTask, replayed

# tokens (B, S), and a generator on their device.
Augment = Callable[[Tensor, torch.Generator], Tensor]

MASKING, AUGMENTING, READING = 0, 1, 2  # purposes of random draws
# masked pixels of validation are drawn as of this step: the same ones every time.
VALIDATION_STEP = -1


@dataclass(frozen=True)
class MaskedPixels:
    """The objective to predict masked pixels (or tokens) from the other pixels, alone or in
    addition to the labels."""

    weight: float = 1.0  # of this objective's loss
    share: float = 0.5  # of a sample's pixels or tokens that are hidden
    # Share of a batch's samples that are read a second time with some hidden, while all labels
    # are predicted from whole ones; 0: each sample is read once, with some hidden, which costs
    # less: for pre-training.
    copies: float = 0.5


class SequenceClassification(TrainingTask):
    """Trains a Classifier on SequenceBatches: cross-entropy of the labels, and of masked pixels.

    Logs `train_loss` (the weighted sum), `train_accuracy`, `pixel_loss`, `gradient_norm`,
    `validation_loss`, `validation_accuracy`, and in testing `test_loss` and `test_accuracy`.

    Args:
        classification_weight: weight of the labels' loss; 0 pre-trains on masked pixels alone.
        masked: how pixels are masked and predicted; None: they are not. The masked pixels follow
            from (seed, micro-batch, rank), so that a resumed run masks the same.
        augment: functions that change the training tokens (B, S) one after another and keep their
            labels. Their random draws follow from (seed, micro-batch, rank) too.
        training_pixels: how many pixels of each image the model reads in training and validation:
            first pixels that are not dark, then dark ones at random. None: all. A test reads all
            pixels.
        compile: run the losses through torch.compile (one graph, static shapes).
        cuda_graphs: record the losses' launches once and replay them; see LanguageModel.
        options: see TrainingTask.

    Raises:
        UserError: `masked` is None and classification_weight is 0, so there is nothing to learn.
    """

    def __init__(
        self,
        model: Classifier,
        *,
        classification_weight: float = 1.0,
        masked: MaskedPixels | None = None,
        augment: Sequence[Augment] = (),
        training_pixels: int | None = None,
        seed: int = 0,
        compile: bool = False,
        cuda_graphs: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        if masked is None:
            above("classification_weight", classification_weight, 0)
        self.model: Classifier = model
        self.classification_weight = classification_weight
        self.masked = masked
        self.augment = augment
        self.training_pixels = training_pixels
        self.seed = seed
        self._compile = compile
        self._replays = compile and cuda_graphs
        self._losses: Callable[..., Losses] = model.losses
        # Of the micro-batches since the last report: the sum of their shares of right
        # answers, and their number.
        self._correct: tuple[Tensor | float, int] = (0.0, 0)
        self._step_corrects: list[Tensor] = []
        self._step_pixels: list[Tensor] = []
        self._generator: torch.Generator | None = None

    def configure_model(self) -> None:
        """Compile the losses by torch.compile if `compile` is set; Lightning calls
        this before it trains."""
        super().configure_model()
        if self._compile:
            mode = "reduce-overhead" if self._replays else None
            self._losses = torch.compile(
                self.model.losses, dynamic=False, fullgraph=True, mode=mode
            )

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits (B, classes) of tokens (B, S)."""
        return self.model(tokens, lengths)

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> Tensor:
        """Return the micro-batch's weighted loss; means over the optimizer step's
        micro-batches are logged."""
        tokens = batch["tokens"]
        generator = self.generator_of(batch_idx, tokens.device, AUGMENTING)
        for augment in self.augment:
            tokens = augment(tokens, generator)
        batch = {**batch, "tokens": tokens}
        losses = self.batch_losses(batch, step=batch_idx, pixels=self.training_pixels)
        loss = self.total(losses)
        self._step_corrects.append(losses.correct.detach())
        self._step_pixels.append(losses.pixels.detach())
        step_loss = self.record_loss(loss, batch_idx)
        if step_loss is not None:
            if self.is_logged_step():
                several = self.trainer.world_size > 1
                self.log("train_loss", step_loss, prog_bar=True, sync_dist=several)
                self.log(
                    "train_accuracy",
                    torch.stack(self._step_corrects).mean(),
                    prog_bar=True,
                    sync_dist=several,
                )
                if self.masked is not None:
                    self.log("pixel_loss", torch.stack(self._step_pixels).mean(), sync_dist=several)
            self._step_pixels.clear()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the step's accuracies to the running sum, now and not before, since a step that fails
        is repeated after a resume."""
        total, count = self._correct
        self._correct = (sum(self._step_corrects, total), count + len(self._step_corrects))
        self._step_corrects.clear()

    def validation_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        """Add the micro-batch to the held-out loss and accuracy, which are means over
        all samples and ranks."""
        self._evaluate("validation", batch)

    def test_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        """Add a micro-batch of test samples to the test loss and accuracy."""
        self._evaluate("test", batch)

    def total(self, losses: Losses) -> Tensor:
        """Return the weighted sum of the losses, which is trained on."""
        loss = self.classification_weight * losses.classification
        if self.masked is not None:
            return loss + self.masked.weight * losses.pixels
        # A model with a head for pixels that is not used now: DDP waits for every
        # parameter's gradient.
        unused = (
            self.model.mask_embedding,
            None if self.model.pixel_head is None else self.model.pixel_head.weight,
        )
        for parameter in unused:
            if parameter is not None:
                loss = loss + 0.0 * parameter.sum()
        return loss

    def batch_losses(
        self, batch: SequenceBatch, *, step: int, masking: bool = True, pixels: int | None = None
    ) -> Losses:
        """Return the losses of a micro-batch, differentiable; nothing is logged.

        Args:
            batch: the samples and their labels.
            step: the micro-batch's number, from which random draws follow.
            masking: whether pixels are masked, if the objective has masked pixels.
            pixels: how many pixels of each image are read (None: all); see `training_pixels`.
        """
        masked = positions = None
        tokens = batch["tokens"]
        if pixels is not None and pixels < tokens.shape[1]:
            positions = pixels_to_read(
                tokens, pixels, self.generator_of(step, tokens.device, READING)
            )
            tokens = tokens.gather(1, positions)
        copies = (
            self.masked is not None and self.masked.copies > 0 and self.classification_weight > 0
        )
        if self.masked is not None and masking:
            rows = max(1, round(self.masked.copies * len(tokens))) if copies else len(tokens)
            generator = self.generator_of(step, tokens.device)
            lengths = batch.get("lengths")
            of_rows = None if lengths is None else lengths[:rows]
            masked = pixels_to_mask(rows, tokens.shape[-1], self.masked.share, generator, of_rows)
        arguments = tokens, batch["labels"], batch.get("lengths"), masked, positions
        if not self._replays:
            return self._losses(*arguments, copies=copies)
        return replayed(self._losses, *arguments, copies=copies)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what every task saves, and the training accuracy that is not logged yet."""
        super().on_save_checkpoint(checkpoint)
        total, count = self._correct
        checkpoint["correct"] = {"sum": float(total), "micro_batches": count}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what on_save_checkpoint saved."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("correct", {})
        self._correct = (float(saved.get("sum", 0.0)), int(saved.get("micro_batches", 0)))

    def take_train_accuracy(self) -> float | None:
        """Return the mean training accuracy of the micro-batches since the last call;
        None if there are none."""
        total, count = self._correct
        self._correct = (0.0, 0)
        return float(total) / count if count else None

    def generator_of(
        self, step: int, device: torch.device, purpose: int = MASKING
    ) -> torch.Generator:
        """Return a random generator for a micro-batch: its seed is made of the run's seed, the
        micro-batch's number `step`, the rank and `purpose` alone."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device)
        rank = self._trainer.global_rank if self._trainer is not None else 0
        return self._generator.manual_seed(mixed(self.seed, step, rank, purpose))

    def _evaluate(self, name: str, batch: SequenceBatch) -> None:
        # Where labels are learned too, they alone are evaluated: reading the rows a second
        # time would tell little.
        pixels = self.training_pixels if name == "validation" else None
        masking = self.classification_weight == 0
        losses = self.batch_losses(batch, step=VALIDATION_STEP, masking=masking, pixels=pixels)
        size = len(batch["labels"])
        self.log(f"{name}_loss", self.total(losses), prog_bar=True, sync_dist=True, batch_size=size)
        self.log(f"{name}_accuracy", losses.correct, prog_bar=True, sync_dist=True, batch_size=size)


def mixed(*numbers: int) -> int:
    """Return a seed below 2**63 that depends on all of the numbers."""
    # The mixing step is SplitMix64's (Steele et al. 2014, "Fast splittable pseudorandom
    # number generators").
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
