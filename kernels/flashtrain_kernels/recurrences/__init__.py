"""Recurrences and short convolutions over packed rows, each document by itself: no attention,
and never called exact.

Plain torch in chunks runs anywhere and is differentiable; on a GPU flash-linear-attention's
kernels run what they can.
"""

from .convolution import short_convolution
from .delta_rule import gated_delta_rule
from .linear_recurrence import decayed_sum, state_space
from .rows import Rows
from .selective_scan import selective_scan
from .shared_rows import SharedRows

__all__ = [
    "Rows",
    "SharedRows",
    "decayed_sum",
    "gated_delta_rule",
    "selective_scan",
    "short_convolution",
    "state_space",
]
