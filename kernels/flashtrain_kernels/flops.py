"""FLOP formulas of the operators, for torch.utils.flop_counter.

A forward multiplies each visible pair twice (QK^T, PV), a backward five times, 2 D operations each. What a Mask or a
BlockMask hides is data, which a formula of shapes cannot know: it counts as computed.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from .ops import BACKWARD, BACKWARD_KVPACKED, BACKWARD_QKVPACKED, FORWARD, FORWARD_KVPACKED, FORWARD_QKVPACKED
from .options import Packed


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None) -> int:
    """How many pairs i + left <= j <= i + right there are; None: no bound on that side."""

    def triangle(n: int) -> int:
        return max(n, 0) * (max(n, 0) + 1) // 2

    def rising(start: int) -> int:
        """The sum of max(0, i + start) over the queries i."""
        return triangle(seqlen_q - 1 + start) - triangle(start - 1)

    def up_to(shift: int) -> int:
        """Pairs with j <= i + shift: the sum of i + shift + 1, held between 0 and Sk."""
        return rising(shift + 1) - rising(shift + 1 - seqlen_k)

    total = seqlen_q * seqlen_k if right is None else up_to(right)
    return max(0, total - (0 if left is None else up_to(left - 1)))


def _flops(q: Sequence[int], seqlen_k: int, options: tuple, products: int) -> int:
    """options: the operator's arguments after its own tensors."""
    batch, seqlen_q, heads, head_dim = q
    packed = Packed(*options)
    return products * 2 * batch * heads * head_dim * visible_pairs(seqlen_q, seqlen_k, packed.left, packed.right)


@register_flop_formula(FORWARD.overloadpacket)
def _forward(q: Any, k: Any, v: Any, *options: Any, out_val: Any = None, **kwargs: Any) -> int:
    return _flops(q, k[1], options, 2)


@register_flop_formula(FORWARD_QKVPACKED.overloadpacket)
def _forward_qkvpacked(qkv: Any, *options: Any, out_val: Any = None, **kwargs: Any) -> int:
    return _flops((qkv[0], qkv[1], qkv[3], qkv[4]), qkv[1], options, 2)


@register_flop_formula(FORWARD_KVPACKED.overloadpacket)
def _forward_kvpacked(q: Any, kv: Any, *options: Any, out_val: Any = None, **kwargs: Any) -> int:
    return _flops(q, kv[1], options, 2)


@register_flop_formula(BACKWARD.overloadpacket)
def _backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, wants: Any, *options: Any, **kwargs: Any
) -> int:
    return _flops(q, k[1], options, 5)


@register_flop_formula(BACKWARD_QKVPACKED.overloadpacket)
def _backward_qkvpacked(
    dout: Any, dlse: Any, qkv: Any, out: Any, lse: Any, wants: Any, *options: Any, **kwargs: Any
) -> int:
    return _flops(dout, qkv[1], options, 5)


@register_flop_formula(BACKWARD_KVPACKED.overloadpacket)
def _backward_kvpacked(
    dout: Any, dlse: Any, q: Any, kv: Any, out: Any, lse: Any, wants: Any, *options: Any, **kwargs: Any
) -> int:
    return _flops(q, kv[1], options, 5)
