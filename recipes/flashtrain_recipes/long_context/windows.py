"""The held-out text that every context length is scored on.

N windows, W tokens of a window, T scored tokens of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashtrain.data.packing import PackedSamples
from flashtrain.data.split import Spans
from flashtrain.data.token_cache import TokenCache, check_ids


@dataclass(frozen=True)
class Windows:
    """tokens (N, W + 1) int64: W inputs, and the label of the last. units (N,) int64: what each window is a part of.

    unit: "documents" where windows are resampled document by document, "windows" where there are no two documents to
    draw among. Windows of one document are alike, so that drawing them singly would make an interval too narrow.
    """

    tokens: Tensor
    units: np.ndarray
    unit: str

    @property
    def count(self) -> int:
        """Units to draw among."""
        return len(np.unique(self.units))


def held_out_windows(cache: TokenCache, held_out: Spans, *, window: int, most: int) -> Windows:
    """Up to `most` windows of `window` tokens (and a label) of the held-out documents.

    Each lies in one document, and windows do not overlap; documents take turns, so that few windows are of many
    documents. Where no document is that long, the documents are laid end to end, as for training, and cut.
    Raises UserError where the held-out text is shorter than one window.
    """
    lengths = held_out.ends - held_out.begins
    fitting = np.maximum(lengths - 1, 0) // window
    if not fitting.any():
        return _across_documents(cache, held_out, window, most)
    chosen = [
        (int(document), turn) for turn in range(int(fitting.max())) for document in np.flatnonzero(fitting > turn)
    ][:most]
    begins = [int(held_out.begins[document]) + turn * window for document, turn in chosen]
    tokens = np.stack([cache.tokens[begin : begin + window + 1] for begin in begins]).astype(np.int64)
    check_ids(tokens, cache.tokenizer.vocab_size, cache.tokens_path)
    documents = np.array([document for document, _ in chosen])
    if len(np.unique(documents)) < 2:
        return Windows(torch.from_numpy(tokens), np.arange(len(chosen)), "windows")
    return Windows(torch.from_numpy(tokens), documents, "documents")


def _across_documents(cache: TokenCache, held_out: Spans, window: int, most: int) -> Windows:
    samples = PackedSamples(
        cache.tokens_path, cache.meta.dtype, held_out, window, vocab_size=cache.tokenizer.vocab_size
    )
    count = min(most, len(samples))
    batch = samples[range(count)]
    tokens = torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1)
    return Windows(tokens, np.arange(count), "windows")
