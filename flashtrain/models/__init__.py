"""Models as plain torch.nn modules: no Lightning, no Hydra, no files.

Public names, importable into any program: GPT2, GPT2Config, SIZES (gpt2.py), Bert, BertEncoder, BertConfig, BERT_SIZES
(bert.py, bert_encoder.py, bert_config.py), SequenceClassifier, TokenClassifier (bert_classifiers.py), Classifier
(classifier.py), ClassifierConfig (classifier_config.py), Attention (attention.py), Block (block.py), Trainable
(trainable.py), GeluFeedForward, SwiGLUFeedForward (feed_forward.py), RotaryPositions, LearnedPositions (positions.py),
AxialRotaryPositions (axial_positions.py), KeyValueCache (cache.py), MemorySavings (memory_savings.py) and with_context
(extension.py). Layers are built bottom up: positions and feed_forward know nothing of attention, attention nothing of
blocks, blocks nothing of gpt2, bert and classifier.
"""

from flashtrain.models.attention import Attention
from flashtrain.models.bert import Bert
from flashtrain.models.bert_classifiers import SequenceClassifier, TokenClassifier
from flashtrain.models.bert_encoder import BERT_SIZES, BertConfig, BertEncoder
from flashtrain.models.block import Block, GeluFeedForward, SwiGLUFeedForward
from flashtrain.models.cache import KeyValueCache
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.models.gpt2 import GPT2, SIZES, GPT2Config
from flashtrain.models.memory_savings import MemorySavings, Trainable
from flashtrain.models.positions import AxialRotaryPositions, LearnedPositions, RotaryPositions
from flashtrain.models.trained_decoders import with_context

__all__ = [
    "BERT_SIZES",
    "GPT2",
    "SIZES",
    "Attention",
    "AxialRotaryPositions",
    "Bert",
    "BertConfig",
    "BertEncoder",
    "Block",
    "Classifier",
    "ClassifierConfig",
    "GPT2Config",
    "GeluFeedForward",
    "KeyValueCache",
    "LearnedPositions",
    "MemorySavings",
    "RotaryPositions",
    "SequenceClassifier",
    "SwiGLUFeedForward",
    "TokenClassifier",
    "Trainable",
    "with_context",
]
