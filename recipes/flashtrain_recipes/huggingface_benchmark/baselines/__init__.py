"""The implementations of a decoder's step: flashtrain's, and transformers' by its attention and compilation."""

from __future__ import annotations

from functools import partial

from flashtrain.training.hardware import Hardware
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.baselines.flashtrain import Flashtrain
from flashtrain_recipes.huggingface_benchmark.baselines.transformers import Transformers
from flashtrain_recipes.step_benchmark.baselines.flashtrain import FLASHTRAIN


def everyone(hardware: Hardware, *, updates: bool, compiled: bool) -> list[HuggingFaceBaseline]:
    """Return one of each, in the order of the tables.

    Args:
        updates: False for forward and backward alone.
        compiled: whether those that are compiled on a GPU are compiled here.
    """
    theirs = partial(Transformers, hardware=hardware, updates=updates)
    return [
        Flashtrain("flashtrain", FLASHTRAIN, hardware, updates=updates, compiled=compiled),
        theirs("hf-flashtrain", "transformers, flashtrain's attention, eager", attention=None),
        theirs("hf-sdpa", "transformers, SDPA, eager"),
        theirs("hf-sdpa-compile", "transformers, SDPA, compiled", compiled=True),
        theirs("hf-sdpa-compile-layers", "transformers, SDPA, layers compiled", compiled=True, by_layer=True),
    ]
