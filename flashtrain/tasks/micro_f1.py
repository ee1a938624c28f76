"""Micro-averaged F1 of labels of which a sample may have any number: the score of multi-label document classification.

N samples, L labels.
"""

from __future__ import annotations

import torch
from torch import Tensor


class MicroF1:
    """2 TP / (2 TP + FP + FN), counted over all samples and labels together; 0 where there are neither.

    threshold: a label is predicted where its probability is above it. Counts add up on the logits' device, which is
    waited for by value() only. Labels of -100 count nothing.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        self.counts: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """logits (N, L) floating; labels (N, L) integers 0, 1 or -100."""
        counted = labels >= 0
        predicted = (logits.sigmoid() > self.threshold) & counted
        present = (labels == 1) & counted
        counts = torch.stack([(predicted & present).sum(), predicted.sum(), present.sum()])
        self.counts = counts if self.counts is None else self.counts + counts

    def value(self) -> float:
        """The score of all that was added."""
        if self.counts is None:
            return 0.0
        true, predicted, present = self.counts.tolist()
        return 2 * true / (predicted + present) if predicted + present else 0.0

    def clear(self) -> None:
        """Forget what was added."""
        self.counts = None
