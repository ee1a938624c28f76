"""How many held-out samples a validation reads: by default so many that it takes a tenth of the training's time."""

from __future__ import annotations

SHARE = 0.1
STEP_TO_FORWARD = 3  # a sample's forward and backward cost three forwards, in FLOPs


def held_out_samples(asked: int | None, every: int, batch: int, *, most: int | None = None) -> int:
    """Samples of each validation: what was asked for, else at most SHARE of what is trained between two of them.

    every: optimiser steps between two validations. batch: samples of a step. most: a bound of its own where nothing was
    asked for. Counted in FLOPs and not in seconds, so that the same settings always read the same samples.
    """
    if asked is not None:
        return asked
    share = max(1, round(SHARE * STEP_TO_FORWARD * every * batch))
    return share if most is None else min(most, share)


def describe_validation(samples: int, asked: int | None, every: int, setting: str) -> str:
    """The line that says how much each validation reads, and which setting asks for another number."""
    bound = "" if asked is not None else f", at most about a tenth of the training's time; {setting}= reads others"
    return f"validation: {samples:,} held-out samples every {every:,} steps{bound}"
