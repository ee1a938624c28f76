"""Score how well a run's model predicts the last tokens of held-out windows, given as much
text as its context holds.

N windows, W tokens of a window, T scored tokens of a window, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flashtrain.data.packing import PackedSamples, Spans
from flashtrain.data.token_cache import OpenTokens
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_settings
from flashtrain.models.decoder import Decoder
from flashtrain.models.generation import MaskMaker, row_mask
from flashtrain.models.trainable import Trainable
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.tasks.language.trained import load_trained, move
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory_measure import AUTOCAST

# One context's losses in nats, (N, T) float64 each: in one forward pass, and sliding
# (score_windows). A key ends the names of its columns.
Scores = dict[str, np.ndarray]
WHOLE, SLIDING = "", "_sliding"


@dataclass(frozen=True)
class Windows:
    """Held-out windows, and the unit (document) of each, by which they are resampled.

    Windows of one document are alike: drawing them one by one would make an interval too narrow.
    """

    tokens: Tensor  # (N, W + 1) int64: W inputs, and the label of the last
    units: np.ndarray  # (N,) int64: the unit that each window is a part of
    unit: str  # "documents", or "windows" where there are no two documents

    @property
    def count(self) -> int:
        """The number of different documents (units) that the windows come from."""
        return len(np.unique(self.units))


def held_out_windows(cache: OpenTokens, held_out: Spans, *, window: int, most: int) -> Windows:
    """Return up to `most` windows of `window` tokens (and a label) of the held-out
    documents, without overlap.

    Each window lies in one document, and documents take turns, so that few windows cover many
    documents. Where every document is shorter than a window, documents are joined end to end, as
    for training, and cut.

    Raises:
        UserError: the held-out text is shorter than one window.
    """
    lengths = held_out.ends - held_out.begins
    fitting = np.maximum(lengths - 1, 0) // window
    if not fitting.any():
        return _across_documents(cache, held_out, window, most)
    chosen = [
        (int(document), turn)
        for turn in range(int(fitting.max()))
        for document in np.flatnonzero(fitting > turn)
    ][:most]
    begins = [int(held_out.begins[document]) + turn * window for document, turn in chosen]
    tokens = np.stack([cache.tokens[begin : begin + window + 1] for begin in begins]).astype(
        np.int64
    )
    documents = np.array([document for document, _ in chosen])
    if len(np.unique(documents)) < 2:
        return Windows(torch.from_numpy(tokens), np.arange(len(chosen)), "windows")
    return Windows(torch.from_numpy(tokens), documents, "documents")


def _across_documents(cache: OpenTokens, held_out: Spans, window: int, most: int) -> Windows:
    samples = PackedSamples(cache.tokens, held_out, window)
    count = min(most, len(samples))
    batch = samples[range(count)]
    tokens = torch.cat((batch["tokens"], batch["labels"][:, -1:]), dim=1)
    return Windows(tokens, np.arange(count), "windows")


@torch.no_grad()
def document_losses(
    model: Trainable,
    documents: Tensor,
    *,
    context: int | None = None,
    stride: int | None = None,
    mask: MaskMaker | None = None,
) -> np.ndarray:
    """Return the losses in nats, (N, S) float64, of tokens 1 to S of each row of
    `documents` (N, S + 1); one reading at a time.

    Args:
        context: tokens that are read at once; None: S.
        stride: tokens by which they move on: each label beyond the first `context` is predicted
            from more than context - stride tokens; None: the context.
        mask: makes the mask that the model was trained with; None: its own rule.
    """
    device, length = next(model.parameters()).device, documents.shape[1] - 1
    context = min(context or length, length)
    ends = [*range(context, length, min(stride or context, context)), length]
    seen = None if mask is None else row_mask(mask, context, device)
    given = {} if seen is None else {"mask": seen}
    found = []
    for row in documents.to(device):
        losses = row.new_empty(length, dtype=torch.float64)
        for end in reversed(ends):  # a label that several read is that of the first
            read = row[None, end - context : end + 1]
            own = model.token_losses(read[:, :-1], read[:, 1:].contiguous(), **given)
            losses[end - context : end] = own[0]
        found.append(losses.cpu().numpy())
    return np.stack(found)


def score_windows(
    model: Trainable,
    windows: Tensor,
    *,
    context: int,
    scored: int,
    stride: int | None = None,
    autocast: torch.dtype | None = None,
    mask: MaskMaker | None = None,
) -> np.ndarray:
    """Return the losses, in nats, of the last tokens of each window, (windows, scored) float64.

    Models of different contexts predict the same tokens, windows[:, -scored:].

    Args:
        windows: (windows, W + 1) int64: W tokens to read, and the label of the last.
        context: tokens that the model reads in one forward pass.
        scored: how many tokens at each window's end are predicted.
        stride: how many tokens at the end of a forward pass are scored (document_losses). None: one
            pass scores all, as in training, the first from context - scored + 1 tokens.
        autocast: the dtype of the blocks' matrix products; None: the weights' dtype.
        mask: makes the mask that the model was trained with; None: causal.
    """
    step = scored if stride is None else min(stride, scored)
    read = windows[:, -(context + scored - step) - 1 :]
    kind = next(model.eval().parameters()).device.type
    with torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
        losses = document_losses(model, read, context=context, stride=step, mask=mask)
    return losses[:, -scored:]


def score_run(
    checkpoint: Path, windows: Tensor, hardware: Hardware, *, context: int, scored: int, stride: int
) -> Scores:
    """Return the losses of a checkpoint's model on the scored tokens, in one forward pass
    and sliding by `stride`.

    The precision is that of training on this machine; score_windows describes the arguments.

    Raises:
        UserError: the model is no decoder of flashtrain.
    """
    trained = load_trained(str(checkpoint), attention=hardware.attention)
    if not trained.model.generates:
        raise UserError(
            f"{type(trained.model).__name__} cannot be scored: only flashtrain's decoders can."
        )
    model = cast(Decoder, move(trained.model, hardware.kind, hardware.precision))
    mask = make_mask(read_settings(trained.folder).applied_mask, packed=False)
    dtype = AUTOCAST.get(hardware.precision)
    score = partial(
        score_windows, model, windows, context=context, scored=scored, autocast=dtype, mask=mask
    )
    return {kind: score(stride=step) for kind, step in ((WHOLE, None), (SLIDING, stride))}
