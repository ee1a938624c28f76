"""The scale of scores in the Hopper kernels, or softcap's terms, and which softcaps they serve."""

import math

from ...options import Options
from .assembly import capped_terms

LOG2_E = math.log2(math.e)


def scale_of(options: Options, bounded: bool = False) -> float | tuple[float, ...]:
    """What makes a product q k the exponent of 2: a factor. With softcap what `assembly.capped` makes a tanh of it with
    (bounded: the exponent less a number that is the same for all), and at place 8 what that is multiplied by."""
    if not options.softcap:
        return options.scale * LOG2_E
    cap = options.softcap * LOG2_E
    terms = (cap, min(cap, 100 - cap)) if bounded else (1.0, 0.0)
    return (*capped_terms(options.scale / options.softcap, *terms), cap)


def why_no_softcap(options: Options) -> str | None:
    """Why the kernels have no such softcap, if so: their coefficients must be float32 numbers (assembly.capped_terms),
    and what hides a pair in the backward times the softcap (backward_parts.hide)."""
    if options.softcap and not (1e-4 < options.scale / options.softcap < 1e3 and 1e-6 < options.softcap < 1e6):
        return "a softcap beyond 1/1000 and 10000 times the scale"
    return None
