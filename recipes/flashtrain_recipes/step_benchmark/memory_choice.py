"""The one place where the measured steps of flashtrain get their memory settings: checkpointing, chunks, offload.

A case of a million tokens trains with what the command would choose for it, and its row says what that was.
"""

from __future__ import annotations

from flashtrain.models.gpt2 import GPT2
from flashtrain.models.trainable import Trainable
from flashtrain.run.batching import choose_batching
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import GIB
from flashtrain_recipes.step_benchmark.contenders import MemoryChoice


def save_memory(settings: Settings, hardware: Hardware, model: Trainable) -> MemoryChoice:
    """Make the model give time for memory as the settings say, and return how.

    settings: of one case, with context and trainer.micro_batch. hardware: with the case's attention and precision.
    model: not compiled yet, and perhaps on the meta device, where only the choice is wanted.
    """
    if not isinstance(model, GPT2):
        return MemoryChoice()
    batching = choose_batching(settings, hardware, model)
    model.save_memory(batching.savings)
    estimate = None if batching.estimate is None else round(batching.estimate.total / GIB, 2)
    return MemoryChoice(batching.savings.describe(), estimate)
