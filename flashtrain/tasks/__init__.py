"""LightningModules: what is trained and how its loss is computed, with no Hydra and no files.

Public: LanguageModel, MaskedLanguageModel, FineTuning, SequenceClassification, MaskedPixels; TrainingTask is what
tasks share.
"""

from flashtrain.tasks.fine_tuning import FineTuning
from flashtrain.tasks.language_model import LanguageModel
from flashtrain.tasks.masked_language_model import MaskedLanguageModel
from flashtrain.tasks.sequence_classification import MaskedPixels, SequenceClassification
from flashtrain.tasks.training_task import TrainingTask

__all__ = [
    "FineTuning",
    "LanguageModel",
    "MaskedLanguageModel",
    "MaskedPixels",
    "SequenceClassification",
    "TrainingTask",
]
