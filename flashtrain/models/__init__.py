"""Models as plain torch.nn modules: no Lightning, no Hydra, no files.

Each public name is imported on its first use, so that training a decoder does not import the encoders. Modules import
only from those below them: positions, attention, block, then gpt2, bert and classifier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain import import_when_used

if TYPE_CHECKING:
    from flashtrain.models.attention import Attention as Attention
    from flashtrain.models.bert import Bert as Bert
    from flashtrain.models.bert_classifiers import SequenceClassifier as SequenceClassifier
    from flashtrain.models.bert_classifiers import TokenClassifier as TokenClassifier
    from flashtrain.models.bert_encoder import BERT_SIZES as BERT_SIZES
    from flashtrain.models.bert_encoder import BertConfig as BertConfig
    from flashtrain.models.bert_encoder import BertEncoder as BertEncoder
    from flashtrain.models.block import Block as Block
    from flashtrain.models.block import GeluFeedForward as GeluFeedForward
    from flashtrain.models.block import SwiGLUFeedForward as SwiGLUFeedForward
    from flashtrain.models.cache import KeyValueCache as KeyValueCache
    from flashtrain.models.classifier import Classifier as Classifier
    from flashtrain.models.classifier_config import ClassifierConfig as ClassifierConfig
    from flashtrain.models.gpt2 import GPT2 as GPT2
    from flashtrain.models.gpt2 import SIZES as SIZES
    from flashtrain.models.gpt2 import GPT2Config as GPT2Config
    from flashtrain.models.memory_savings import MemorySavings as MemorySavings
    from flashtrain.models.positions import AxialRotaryPositions as AxialRotaryPositions
    from flashtrain.models.positions import LearnedPositions as LearnedPositions
    from flashtrain.models.positions import RotaryPositions as RotaryPositions
    from flashtrain.models.trainable import Trainable as Trainable
    from flashtrain.models.trained_decoders import with_context as with_context

_HOMES = {
    "Attention": "attention",
    "Bert": "bert",
    "SequenceClassifier": "bert_classifiers",
    "TokenClassifier": "bert_classifiers",
    "BERT_SIZES": "bert_encoder",
    "BertConfig": "bert_encoder",
    "BertEncoder": "bert_encoder",
    "Block": "block",
    "GeluFeedForward": "block",
    "SwiGLUFeedForward": "block",
    "KeyValueCache": "cache",
    "Classifier": "classifier",
    "ClassifierConfig": "classifier_config",
    "GPT2": "gpt2",
    "GPT2Config": "gpt2",
    "SIZES": "gpt2",
    "MemorySavings": "memory_savings",
    "Trainable": "trainable",
    "AxialRotaryPositions": "positions",
    "LearnedPositions": "positions",
    "RotaryPositions": "positions",
    "with_context": "trained_decoders",
}
__all__ = [*_HOMES]
__getattr__ = import_when_used(__name__, _HOMES)
