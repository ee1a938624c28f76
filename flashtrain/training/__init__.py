"""What a training run needs around its model, each usable in any Lightning program and none knowing Hydra.

`hardware` (Hardware, detect_hardware), `memory` (estimate_memory, choose_micro_batch), `optimizers` (adamw,
parameter_groups), `lamb` (Lamb, lamb), `schedules` (cosine_with_warmup, linear_with_warmup, constant_with_warmup),
`gradients` (clip_gradients, ClipsGradients), `throughput` (Throughput), `finite` (StopOnNonFinite), `checkpoints`
(AtomicCheckpointIO, checkpoint_callbacks, SaveLast, find_resumable, read_checkpoint, read_weights), `signals`
(SaveOnSignal), `progress` (make_progress), `loggers` (make_loggers, log_figure), `metrics_file` (MetricsFile).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Imported when first used: `hardware` and `memory` need no Lightning, whose import takes seconds.
_PUBLIC = {
    "ClipsGradients": "gradients",
    "SaveOnSignal": "signals",
    "StopOnNonFinite": "finite",
    "Throughput": "throughput",
    "adamw": "optimizers",
    "checkpoint_callbacks": "checkpoints",
    "clip_gradients": "gradients",
    "detect_hardware": "hardware",
    "make_loggers": "loggers",
    "make_progress": "progress",
}

__all__ = [
    "ClipsGradients",
    "SaveOnSignal",
    "StopOnNonFinite",
    "Throughput",
    "adamw",
    "checkpoint_callbacks",
    "clip_gradients",
    "detect_hardware",
    "make_loggers",
    "make_progress",
]

if TYPE_CHECKING:
    from flashtrain.training.callbacks import StopOnNonFinite
    from flashtrain.training.checkpoints import checkpoint_callbacks
    from flashtrain.training.hardware import detect_hardware
    from flashtrain.training.loggers import make_loggers
    from flashtrain.training.optimizers import adamw
    from flashtrain.training.progress import make_progress
    from flashtrain.training.signals import SaveOnSignal
    from flashtrain.training.steps import ClipsGradients, clip_gradients
    from flashtrain.training.throughput import Throughput


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flashtrain.training' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"flashtrain.training.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
