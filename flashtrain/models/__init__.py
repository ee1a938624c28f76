"""Models as plain torch.nn modules: no Lightning, no Hydra, no files.

Each public name is imported on its first use, so that training a decoder does
not import the encoders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain.lazy import import_when_used

if TYPE_CHECKING:
    from flashtrain.models.activation_checkpointing import MemorySavings as MemorySavings
    from flashtrain.models.attention import Attention as Attention
    from flashtrain.models.bert import Bert as Bert
    from flashtrain.models.bert_classifiers import SequenceClassifier as SequenceClassifier
    from flashtrain.models.bert_classifiers import TokenClassifier as TokenClassifier
    from flashtrain.models.bert_config import BERT_SIZES as BERT_SIZES
    from flashtrain.models.bert_config import BertConfig as BertConfig
    from flashtrain.models.bert_encoder import BertEncoder as BertEncoder
    from flashtrain.models.block import Block as Block
    from flashtrain.models.classifier import Classifier as Classifier
    from flashtrain.models.classifier_config import ClassifierConfig as ClassifierConfig
    from flashtrain.models.decoder import GPT2 as GPT2
    from flashtrain.models.decoder import Decoder as Decoder
    from flashtrain.models.decoder_config import SIZES as SIZES
    from flashtrain.models.decoder_config import DecoderConfig as DecoderConfig
    from flashtrain.models.decoder_config import GPT2Config as GPT2Config
    from flashtrain.models.longer_context import with_context as with_context
    from flashtrain.models.positions import RotaryPositions as RotaryPositions
    from flashtrain.models.trainable import Trainable as Trainable

_HOMES = {
    "Attention": "attention",
    "Bert": "bert",
    "SequenceClassifier": "bert_classifiers",
    "TokenClassifier": "bert_classifiers",
    "BERT_SIZES": "bert_config",
    "BertConfig": "bert_config",
    "BertEncoder": "bert_encoder",
    "Block": "block",
    "Classifier": "classifier",
    "ClassifierConfig": "classifier_config",
    "Decoder": "decoder",
    "DecoderConfig": "decoder_config",
    "GPT2": "decoder",
    "GPT2Config": "decoder_config",
    "SIZES": "decoder_config",
    "MemorySavings": "activation_checkpointing",
    "Trainable": "trainable",
    "RotaryPositions": "positions",
    "with_context": "longer_context",
}
__all__ = [*_HOMES]
__getattr__ = import_when_used(__name__, _HOMES)
