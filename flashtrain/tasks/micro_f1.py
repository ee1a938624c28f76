"""Micro-averaged F1 of labels of which a sample may have any number: the score of multi-label document classification.

N samples, L labels.
"""

from __future__ import annotations

from torch import Tensor
from torchmetrics.classification import BinaryF1Score


class MicroF1(BinaryF1Score):
    """2 TP / (2 TP + FP + FN), counted over all samples and labels together; 0 where there are neither.

    threshold: a label is predicted where its probability is above it. Labels of -100 count nothing.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__(threshold=threshold, ignore_index=-100, validate_args=False)  # checking waits for the device

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """logits (N, L) floating; labels (N, L) integers 0, 1 or -100."""
        # torchmetrics takes logits that happen to lie in [0, 1] for probabilities.
        super().update(logits.sigmoid(), labels)
