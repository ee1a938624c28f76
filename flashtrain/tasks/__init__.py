"""LightningModules: what is trained and how its loss is computed, with no Hydra and no files.

Public: LanguageModel, MaskedLanguageModel.
"""

from flashtrain.tasks.language_model import LanguageModel
from flashtrain.tasks.masked_language_model import MaskedLanguageModel

__all__ = ["LanguageModel", "MaskedLanguageModel"]
