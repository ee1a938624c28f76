"""LightningModules: what is trained and how its loss is computed, with no Hydra and no files.

Public: LanguageModel.
"""

from flashtrain.tasks.language_model import LanguageModel

__all__ = ["LanguageModel"]
