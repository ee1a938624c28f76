"""LightningModules: what is trained and how its loss is computed, with no Hydra and no files.

Public: LanguageModel, MaskedLanguageModel, FineTuning, SequenceClassification, MaskedPixels; TrainingTask is what
tasks share.
"""

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "FineTuning": "fine_tuning.task",
    "LanguageModel": "language.task",
    "MaskedLanguageModel": "masked_language.task",
    "MaskedPixels": "classification.task",
    "SequenceClassification": "classification.task",
    "TrainingTask": "training_task",
}

__all__ = [
    "FineTuning",
    "LanguageModel",
    "MaskedLanguageModel",
    "MaskedPixels",
    "SequenceClassification",
    "TrainingTask",
]

if TYPE_CHECKING:
    from flashtrain.tasks.classification.task import MaskedPixels, SequenceClassification
    from flashtrain.tasks.fine_tuning.task import FineTuning
    from flashtrain.tasks.language.task import LanguageModel
    from flashtrain.tasks.masked_language.task import MaskedLanguageModel
    from flashtrain.tasks.training_task import TrainingTask


def __getattr__(name: str) -> Any:  # when first used: a task's settings are read without Lightning
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flashtrain.tasks' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"flashtrain.tasks.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
