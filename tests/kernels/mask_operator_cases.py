"""Inputs of the operators that fill masks: documents of many lengths, some tokens in none,
and every kind of mask."""

import torch

from flashtrain_kernels.masks import operators, rows

_LENGTHS = [[5, 1, 20, 1, 40, 3], [70], [1] * 6 + [64], [16, 16, 32, 6]]
IDS = {
    "rows": torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in _LENGTHS]
    ),
    "numbers that come again": torch.tensor([[3, 3, 1, 3, 3] * 7], dtype=torch.int32),
    "every second of more": (torch.arange(90, dtype=torch.int16)[None].expand(3, -1) // 11)[:, ::2],
    "one token": torch.zeros(2, 1, dtype=torch.int64),
    "no tokens": torch.zeros(2, 0, dtype=torch.int64),
    "no rows": torch.zeros(0, 3, dtype=torch.int64),
}
# Empty sequences, tokens past the last boundary, boundaries past the last token; then
# nonsense, but increasing.
CU_SEQLENS = [
    [0, 45],
    [0, 3, 3, 20, 41],
    [0, 0, 0, 17, 33, 33],
    [0, 16, 32, 48, 64, 80],
    [5, 9, 30],
    [-9, 4, 70],
]

_WINDOWS = {"everything": (-1, -1), "causal": (-1, 0), "narrow": (7, 3), "huge": (2**40, 2**40)}
CASES = [
    *(("window", *window, 0) for window in _WINDOWS.values()),
    ("prefix", -1, -1, 0),
    *(("blocks", -1, -1, count) for count in (1, 7, 2**40)),
    ("shared question", -1, -1, 0),
    ("blockwise", -1, -1, 0),
    *((kind, left, right, count) for kind in ("global", "causal global") for left, right, count in
      [(7, 3, 4), (-1, 0, 0), (0, 0, 2**40)]),
]  # fmt: skip


def given(case, documents):
    """The arguments of document_rows. documents: "rows" of a batch, "gaps": some tokens in
    none, "whole": one a row."""
    kind, left, right, count = case
    if documents == "gaps":
        start, end = rows.bounds_of_cu_seqlens(torch.tensor([4, 9, 9, 50, 61]), 70)
        start, end = start.expand(4, -1), end.expand(4, -1)
    elif documents == "rows":
        start, end = rows.bounds_of_ids(IDS["rows"])
    else:
        start = torch.zeros(4, 70, dtype=torch.int32)
        end = torch.full_like(start, 70)
    first = past = prefix = None
    if kind in (operators.SHARED_QUESTION, operators.BLOCKWISE):
        first, past = rows.bounds_of_ids((torch.arange(70) // 9).expand(4, -1))
    if kind == operators.PREFIX:
        prefix = torch.arange(-20, 260).view(4, 70) % 97 - 20
    return kind, start, end, first, past, prefix, left, right, count
