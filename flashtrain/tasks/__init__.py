"""LightningModules: what is trained and how its loss is computed, with no Hydra and no files.

Public: LanguageModel, SequenceClassification, MaskedPixels; TrainingTask is what tasks share.
"""

from flashtrain.tasks.language_model import LanguageModel
from flashtrain.tasks.sequence_classification import MaskedPixels, SequenceClassification
from flashtrain.tasks.training_task import TrainingTask

__all__ = ["LanguageModel", "MaskedPixels", "SequenceClassification", "TrainingTask"]
