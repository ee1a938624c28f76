"""flashtrain: train long-context models with exact FlashAttention kernels, Hydra and PyTorch Lightning.

The command is `python -m flashtrain recipe=gpt2`. From a program of your own, the names below are all there is to
know; each is imported when first used, so that `import flashtrain` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "GPT2": "flashtrain.models",
    "GPT2Config": "flashtrain.models",
    "Attention": "flashtrain.models",
    "ContextParallelStrategy": "flashtrain.distributed.context.strategy",
    "LanguageModel": "flashtrain.tasks",
    "TextDataModule": "flashtrain.data.datamodule",
    "Throughput": "flashtrain.training.throughput",
    "UserError": "flashtrain.errors",
    "generate": "flashtrain.models.trained_decoders",
    "mean_over_context": "flashtrain.distributed.context.sequence",
    "next_positions": "flashtrain.models.cache",
    "register": "flashtrain.registry",
    "main": "flashtrain.__main__",
}

__all__ = [
    "GPT2",
    "Attention",
    "ContextParallelStrategy",
    "GPT2Config",
    "LanguageModel",
    "TextDataModule",
    "Throughput",
    "UserError",
    "__version__",
    "generate",
    "main",
    "mean_over_context",
    "next_positions",
    "register",
]

if TYPE_CHECKING:
    from flashtrain.__main__ import main
    from flashtrain.data.datamodule import TextDataModule
    from flashtrain.distributed.context.sequence import mean_over_context
    from flashtrain.distributed.context.strategy import ContextParallelStrategy
    from flashtrain.errors import UserError
    from flashtrain.models import GPT2, Attention, GPT2Config
    from flashtrain.models.cache import next_positions
    from flashtrain.models.trained_decoders import generate
    from flashtrain.registry import register
    from flashtrain.tasks import LanguageModel
    from flashtrain.training.throughput import Throughput


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flashtrain' has no attribute '{name}'")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
