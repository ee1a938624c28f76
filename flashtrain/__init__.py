"""flashtrain: train long-context models with exact FlashAttention kernels, Hydra
and PyTorch Lightning.

The command is `python -m flashtrain recipe=gpt2`, and in Python it is
`flashtrain.train("gpt2")`. The names below are the public ones; each is imported when first
used, so that `import flashtrain` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain.lazy import import_when_used
from flashtrain.version import __version__ as __version__

if TYPE_CHECKING:
    from flashtrain.__main__ import main as main
    from flashtrain.checks.check import LightningCheck as LightningCheck
    from flashtrain.checks.check import check as check
    from flashtrain.checks.check import trainer_check as trainer_check
    from flashtrain.command.api import Run as Run
    from flashtrain.command.api import evaluate as evaluate
    from flashtrain.command.api import export as export
    from flashtrain.command.api import generate as generate
    from flashtrain.command.api import load as load
    from flashtrain.command.api import plan as plan
    from flashtrain.command.api import train as train
    from flashtrain.data.chat_datamodule import ChatDataModule as ChatDataModule
    from flashtrain.data.datamodule import TextDataModule as TextDataModule
    from flashtrain.distributed.context.strategy import (
        ContextParallelStrategy as ContextParallelStrategy,
    )
    from flashtrain.errors import UserError as UserError
    from flashtrain.models.attention import Attention as Attention
    from flashtrain.models.decoder import GPT2 as GPT2
    from flashtrain.models.decoder import Decoder as Decoder
    from flashtrain.models.decoder_config import DecoderConfig as DecoderConfig
    from flashtrain.models.decoder_config import GPT2Config as GPT2Config
    from flashtrain.models.sharded_sequence import mean_over_context as mean_over_context
    from flashtrain.models.sharded_sequence import next_positions as next_positions
    from flashtrain.registry import register as register
    from flashtrain.tasks.language.task import LanguageModel as LanguageModel
    from flashtrain.training.throughput import Throughput as Throughput

_HOMES = {
    "train": "command.api",
    "evaluate": "command.api",
    "generate": "command.api",
    "export": "command.api",
    "load": "command.api",
    "plan": "command.api",
    "check": "checks.check",
    "LightningCheck": "checks.check",
    "trainer_check": "checks.check",
    "Run": "command.api",
    "Decoder": "models.decoder",
    "DecoderConfig": "models.decoder_config",
    "GPT2": "models.decoder",
    "GPT2Config": "models.decoder_config",
    "Attention": "models.attention",
    "ChatDataModule": "data.chat_datamodule",
    "ContextParallelStrategy": "distributed.context.strategy",
    "LanguageModel": "tasks.language.task",
    "TextDataModule": "data.datamodule",
    "Throughput": "training.throughput",
    "UserError": "errors",
    "mean_over_context": "models.sharded_sequence",
    "next_positions": "models.sharded_sequence",
    "register": "registry",
    "main": "__main__",
}
__all__ = ["__version__", *_HOMES]
__getattr__ = import_when_used(__name__, _HOMES)
