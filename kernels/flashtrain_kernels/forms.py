"""The layouts in which public functions take q, k and v.

B batch, S sequence (Sq queries, Sk keys), T packed tokens (Tq, Tk), H query heads, K key/value
heads, D head dimension of queries and keys, Dv of values (at most D).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_Q, _Q_ROW = "(B, Sq, H, D)", "(Tq, H, D)"


# Compared and hashed by identity, at every call. torch.compile would hash a
# frozen one by its fields.
@dataclass(eq=False)
class Form:
    """The layout of a call's tensors and results. Log-sum-exps are (B, H, Sq) or, for
    a packed row, (H, Tq).

    Attributes:
        layouts: {name: shape in letters} of the tensors.
        row: sequences are packed into one row, and tensors and results have no batch dimension.
        heads_first: heads come before the sequence in the tensors; out is (B,
            Sq, H, Dv) nevertheless.
    """

    layouts: dict[str, str]
    row: bool = False
    heads_first: bool = False

    def to_batch(self, x: Tensor) -> Tensor:
        """Return a view (B, S, ..., heads, D) of a tensor in this layout."""
        return x[None] if self.row else x.transpose(1, 2) if self.heads_first else x

    def bare(self, x: Tensor) -> Tensor:
        """Return a result in this layout, as a tensor that is no view: autograd lets nobody write
        in place to views that a Function returns."""
        return x.detach().squeeze_(0) if self.row else x.detach().transpose_(1, 2)

    def of_batch(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Convert results out (B, Sq, H, Dv) and lse (B, H, Sq) to this form, differentiably."""
        if not self.row:
            return out, lse
        # The gradient of [0] would fill a tensor with zeros, and copy into it.
        return out.squeeze(0), None if lse is None else lse.squeeze(0)


BATCH = Form({"q": _Q, "k": "(B, Sk, K, D)", "v": "(B, Sk, K, Dv)"})
KV_PACKED = Form({"q": _Q, "kv": "(B, Sk, 2, K, D)"})
QKV_PACKED = Form({"qkv": "(B, S, 3, H, D)"})
ROW = Form({"q": _Q_ROW, "k": "(Tk, K, D)", "v": "(Tk, K, Dv)"}, row=True)
ROW_KV_PACKED = Form({"q": _Q_ROW, "kv": "(Tk, 2, K, D)"}, row=True)
ROW_QKV_PACKED = Form({"qkv": "(T, 3, H, D)"}, row=True)
HEADS_FIRST = Form(
    {"q": "(B, H, Sq, D)", "k": "(B, K, Sk, D)", "v": "(B, K, Sk, Dv)"}, heads_first=True
)
PAGED = Form(
    {"q": _Q_ROW, "k": "(pages, page size, K, D)", "v": "(pages, page size, K, Dv)"}, row=True
)


def apart(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v from (q, k, v), (q, kv) or (qkv,); packed ones are
    stacked in dimension 2."""
    if len(tensors) == 3:
        q, k, v = tensors
    else:
        q, k, v = (*tensors[:-1], *tensors[-1].unbind(2))
    return q, k, v
