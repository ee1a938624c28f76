"""A trained run's model on this machine, scored on windows; and its scores, kept beside it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.files.npy_files import DamagedArrayError, read_npz
from flashtrain.models.gpt2 import GPT2
from flashtrain.run.checkpoint_model import load_trained, move
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.long_context.compare import Scores
from flashtrain_recipes.long_context.scoring import score_windows

KEPT_SCORES = "scores.npz"


def kept_scores(
    run: Path, checkpoint: str, windows: Tensor, hardware: Hardware, *, context: int, scored: int, stride: int
) -> Scores:
    """score_run, or what it found before: RUN/scores.npz holds the losses, and stands in for a checkpoint taken away.

    Losses on other windows, or scored otherwise, are not taken for these.
    """
    key = hashlib.blake2b(windows.numpy().tobytes(), digest_size=16)
    key.update(f"{context} {scored} {stride}".encode())
    file = run / KEPT_SCORES
    losses = ("float32", (len(windows), scored))
    try:
        noted = read_npz(file, {"key": (f"<U{len(key.hexdigest())}", ())})["key"]
        if str(noted) == key.hexdigest():
            return Scores(**read_npz(file, {"whole": losses, "sliding": losses}))
    except FileNotFoundError:
        pass
    except DamagedArrayError as damage:
        say(f"{file} is not what was written there ({damage}): scoring again")
    found = score_run(run / checkpoint, windows, hardware, context=context, scored=scored, stride=stride)
    if hardware.kind == "cuda":
        torch.cuda.empty_cache()  # the next training is another process, and needs the memory
    unfinished = file.with_name(f".{os.getpid()}-{KEPT_SCORES}")
    np.savez(unfinished, key=np.array(key.hexdigest()), whole=found.whole, sliding=found.sliding)
    unfinished.replace(file)
    return found


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
