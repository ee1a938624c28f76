"""The scale of scores, or softcap's terms, in the Hopper kernels, and which softcaps they serve."""

import math

from ...options import Options
from .assembly import capped_terms

LOG2_E = math.log2(math.e)


def scale_of(options: Options, bounded: bool = False) -> float | tuple[float, ...]:
    """Return scale * log2(e), which turns a product q k into a base-2 score. With softcap return 9
    numbers: 8 coefficients for `assembly.capped` to compute tanh(scale q k / softcap), and cap =
    softcap * log2(e). With `bounded` the 8 are for cap * tanh - min(cap, 100 - cap) instead: a
    weight's exponent that needs no maximum of the row."""
    if not options.softcap:
        return options.scale * LOG2_E
    cap = options.softcap * LOG2_E
    terms = (cap, min(cap, 100 - cap)) if bounded else (1.0, 0.0)
    return (*capped_terms(options.scale / options.softcap, *terms), cap)


def why_no_softcap(options: Options) -> str | None:
    """Return None if the kernels serve this softcap, above 0, else the reason. What they
    compute must fit float32."""
    if not (1e-4 < options.scale / options.softcap < 1e3 and 1e-6 < options.softcap < 1e6):
        return "softcap must be from 1/1000 to 10000 times the scale, and from 1e-6 to 1e6"
    return None
