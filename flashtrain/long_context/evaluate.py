"""A trained run's model on this machine, scored on windows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flashtrain.checkpoint_model import load_trained, move
from flashtrain.errors import UserError
from flashtrain.long_context.compare import Scores
from flashtrain.long_context.scoring import score_windows
from flashtrain.models.gpt2 import GPT2
from flashtrain.training.hardware import Hardware


def score_run(
    checkpoint: Path, windows: Tensor, hardware: Hardware, *, context: int, scored: int, stride: int
) -> Scores:
    """The losses of a checkpoint's model on the scored tokens of the windows (N, W + 1), both ways of reading them.

    In the precision that it was trained in on this machine. Raises UserError for a model that is no decoder of ours.
    """
    trained = load_trained(str(checkpoint), attention=hardware.attention)
    if not isinstance(trained.model, GPT2):
        raise UserError(f"{type(trained.model).__name__} cannot be scored: only flashtrain's decoders can.")
    model = move(trained.model, hardware.kind, hardware.precision)
    if not isinstance(model, GPT2):
        raise TypeError(f"expected GPT2, got {type(model).__name__}")
    dtype = autocast_dtype(hardware.precision)
    whole, sliding = (
        score_windows(model, windows, context=context, scored=scored, stride=step, autocast=dtype).numpy()
        for step in (None, stride)
    )
    return Scores(whole, sliding)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype that Lightning's precision of this name lets matrix products take; None where it is the weights'."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
