"""Operators (torch.library) that find where documents begin and end, and that fill a Mask's
rows: the first key that each query sees, and the first past it. On a GPU one or two launches each.

B batch, S sequence, T packed tokens, N sequences.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows

# The kinds of masks within documents; document_rows says what each takes besides them.
WINDOW, PREFIX, BLOCKS = "window", "prefix", "blocks"
SHARED_QUESTION, BLOCKWISE = "shared question", "blockwise"
GLOBAL, CAUSAL_GLOBAL = "global", "causal global"
TWO_INTERVALS = (SHARED_QUESTION, GLOBAL, CAUSAL_GLOBAL)

SCHEMAS = {
    "bounds_of_ids": "(Tensor ids) -> (Tensor, Tensor)",
    "bounds_of_cu_seqlens": "(Tensor cu_seqlens, SymInt total) -> (Tensor, Tensor)",
    "document_rows": (
        "(str kind, Tensor start, Tensor end, Tensor? first, Tensor? past, Tensor? prefix, "
        "SymInt left, SymInt right, SymInt count) -> Tensor"
    ),
    "packed_rows": (
        "(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt total_q, SymInt total_k, SymInt left, "
        "SymInt right) -> Tensor"
    ),
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"flashtrain_kernels::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
_operators = torch.ops.flashtrain_kernels


# (start, end), (B, S) int32 each, of the runs of equal numbers in a row of ids (B, S)
# of any integer dtype.
bounds_of_ids = _operators.bounds_of_ids.default
# (start, end), (1, total) int32 each, of the sequence of each token; both 0 for a token in none.
bounds_of_cu_seqlens = _operators.bounds_of_cu_seqlens.default
# Mask.queries of sequences packed into one row, under a window aligned bottom-right
# within each sequence.
packed_rows = _operators.packed_rows.default


def document_rows(
    kind: str,
    start: Tensor,
    end: Tensor,
    *,
    first: Tensor | None = None,
    past: Tensor | None = None,
    prefix: Tensor | None = None,
    left: int = -1,
    right: int = -1,
    count: int = 0,
) -> Tensor:
    """Make the tensor Mask.queries, (5 or 7, B, S) int32, of a mask within documents. All
    other tensors are (B, S).

    Args:
        kind: the mask's kind, one of this module's constants (WINDOW, PREFIX, ...).
        start, end: each token's document: its first index, and one past its last.
        first, past: each token's segment, likewise (for SHARED_QUESTION and BLOCKWISE).
        prefix: the length of the prefix of each token's document, any integer dtype (for PREFIX).
        left, right: window in tokens, inclusive; -1: no bound (for WINDOW, GLOBAL, CAUSAL_GLOBAL).
        count: number of global tokens (for GLOBAL, CAUSAL_GLOBAL), or tokens
            in a block (for BLOCKS).
    """
    return _operators.document_rows(kind, start, end, first, past, prefix, left, right, count)


def a_call_for_each_sample(
    call: Callable, samples: int, in_dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple:
    """A torch.vmap rule: run `call` once for each sample of the batched inputs; return
    (stacked outputs, dims)."""
    called = []
    for sample in range(samples):
        # The dimensions of a list of numbers are a list.
        own = [
            x.select(dim, sample) if isinstance(dim, int) else x
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        called.append(call(*own))
    if isinstance(called[0], Tensor):
        return torch.stack(called), 0
    return tuple(torch.stack(list(each)) for each in zip(*called, strict=True)), (0,) * len(
        called[0]
    )


def register_vmap(name: str, operator: Any) -> None:
    """Register a torch.vmap rule that runs an operator once for each sample. name: the
    operator's qualified name."""

    def vmapped(info: Any, in_dims: tuple, *inputs: Any) -> tuple:
        return a_call_for_each_sample(operator, info.batch_size, in_dims, inputs)

    torch.library.register_vmap(name, vmapped)


def _register(name: str, fake: Callable) -> None:
    torch.library.impl(f"flashtrain_kernels::{name}", "default", getattr(rows, name))
    torch.library.register_fake(f"flashtrain_kernels::{name}")(fake)
    register_vmap(f"flashtrain_kernels::{name}", getattr(_operators, name))


def _pair(like: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(shape, dtype=torch.int32), like.new_empty(shape, dtype=torch.int32)


_register("bounds_of_ids", lambda ids: _pair(ids, *ids.shape))
_register("bounds_of_cu_seqlens", lambda cu_seqlens, total: _pair(cu_seqlens, 1, total))
_register(
    "document_rows",
    lambda kind, start, *_: start.new_empty(
        (7 if kind in TWO_INTERVALS else 5, *start.shape), dtype=torch.int32
    ),
)
_register(
    "packed_rows",
    lambda bounds, _, total_q, *rest: bounds.new_empty((5, 1, total_q), dtype=torch.int32),
)
