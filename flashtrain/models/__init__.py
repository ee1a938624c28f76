"""Models as plain torch.nn modules: no Lightning, no Hydra, no files.

Public names, importable into any program: GPT2, GPT2Config, SIZES (gpt2.py), Attention (attention.py), Block
(block.py), Trainable (trainable.py), GeluFeedForward, SwiGLUFeedForward (feed_forward.py), RotaryPositions,
LearnedPositions (positions.py), KeyValueCache (cache.py), MemorySavings (memory_savings.py) and with_context
(extension.py). Layers are built bottom up: positions and feed_forward know nothing of attention, attention nothing of
blocks, blocks nothing of gpt2.
"""

from flashtrain.models.attention import Attention
from flashtrain.models.block import Block
from flashtrain.models.cache import KeyValueCache
from flashtrain.models.extension import with_context
from flashtrain.models.feed_forward import GeluFeedForward, SwiGLUFeedForward
from flashtrain.models.gpt2 import GPT2, SIZES, GPT2Config
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.positions import LearnedPositions, RotaryPositions
from flashtrain.models.trainable import Trainable

__all__ = [
    "GPT2",
    "SIZES",
    "Attention",
    "Block",
    "GPT2Config",
    "GeluFeedForward",
    "KeyValueCache",
    "LearnedPositions",
    "MemorySavings",
    "RotaryPositions",
    "SwiGLUFeedForward",
    "Trainable",
    "with_context",
]
