"""Confidence intervals of mean losses, by resampling whole documents (the bootstrap:
Efron 1979, percentiles).

N windows, T scored tokens of a window, U units (documents, or windows), R resamples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000  # of the bootstrap (R)


class Interval(NamedTuple):
    """A value and its 95% interval. low and high are None where there are fewer than
    two units to resample."""

    value: float
    low: float | None
    high: float | None


def draws(units: int, seed: int) -> np.ndarray:
    """Return the units in each bootstrap resample, drawn with replacement, (R, U) int64;
    equal for equal arguments."""
    # RandomState's stream is frozen: a published interval stays the same under
    # every version of numpy.
    return np.random.RandomState(seed).randint(0, units, size=(RESAMPLES, units))


def per_unit(losses: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of the losses in each unit, both (U,).

    Args:
        losses: (N, T): the loss of each of the T scored tokens in each of N windows.
        units: (N,), the unit (document) of each window.
    """
    _, place = np.unique(units, return_inverse=True)
    sums = np.bincount(place, weights=losses.sum(axis=1, dtype=np.float64))
    counts = np.bincount(place) * losses.shape[1]
    return sums, counts


def mean_interval(sums: np.ndarray, counts: np.ndarray, drawn: np.ndarray) -> Interval:
    """Return the mean loss over all tokens, with the 95% interval of the resampled means.

    Args:
        sums, counts: (U,), the sum and the number of the losses in each unit (per_unit).
        drawn: (R, U), the units in each of R resamples (draws).
    """
    value = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Interval(value, None, None)
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))
