"""The tasks: for each its settings, what `run` asks of it (spec), and the LightningModule
that trains its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain.lazy import import_when_used

if TYPE_CHECKING:
    from flashtrain.tasks.classification import MaskedPixels as MaskedPixels
    from flashtrain.tasks.classification import SequenceClassification as SequenceClassification
    from flashtrain.tasks.fine_tuning.task import FineTuning as FineTuning
    from flashtrain.tasks.language.task import LanguageModel as LanguageModel
    from flashtrain.tasks.masked_language.task import MaskedLanguageModel as MaskedLanguageModel
    from flashtrain.tasks.training_task import TrainingTask as TrainingTask

_HOMES = {
    "MaskedPixels": "classification",
    "SequenceClassification": "classification",
    "FineTuning": "fine_tuning.task",
    "LanguageModel": "language.task",
    "MaskedLanguageModel": "masked_language.task",
    "TrainingTask": "training_task",
}
__all__ = [*_HOMES]
__getattr__ = import_when_used(__name__, _HOMES)
