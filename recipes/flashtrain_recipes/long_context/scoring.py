"""How well a model predicts the last tokens of each window, given as much before them as its context holds.

N windows, W tokens of a window, T scored tokens, V vocabulary rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2

TOKENS_AT_ONCE = 65536


def score_windows(
    model: GPT2,
    windows: Tensor,
    *,
    context: int,
    scored: int,
    stride: int | None = None,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Losses in nats of the last `scored` tokens of each window: (N, T) float32 on the CPU.

    windows (N, W + 1) int64. The scored tokens are windows[:, -scored:] for every context, so that models of different
    contexts predict the same. stride None: in one pass over the `context` tokens before the window's last, as in
    training: the first scored token is predicted from context - scored + 1 tokens, the last from all of them. stride s:
    s tokens a pass, each pass reading the `context` tokens before its own last, so that every token is predicted from
    more than context - s tokens (from fewer only where the window begins later), near all that the context can hold.
    autocast: dtype of the blocks' matrix products (None: the weights'); the output head keeps the weights' own.
    Raises UserError for a context that does not fit between `scored` and W.
    """
    size = windows.shape[1] - 1
    if not scored <= context <= size:
        raise UserError(
            f"a context of {context}, of which {scored} tokens are scored, in windows of {size}. "
            f"Possible: {scored} to {size}."
        )
    step = scored if stride is None else min(stride, scored)
    device = next(model.parameters()).device
    rows = max(1, TOKENS_AT_ONCE // context)
    losses = torch.empty(len(windows), scored)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(windows), rows):
                part = windows[first : first + rows].to(device)
                for begin in range(0, scored, step):
                    count = min(step, scored - begin)
                    end = size - scored + begin + count
                    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                        hidden = model.hidden(part[:, max(0, end - context) : end])[:, -count:]
                    losses[first : first + rows, begin : begin + count] = _losses(
                        model, hidden, part[:, end - count + 1 : end + 1]
                    )
    finally:
        model.train(was_training)
    return losses


def _losses(model: GPT2, hidden: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each label, (rows, tokens) on the CPU; one row at a time, since V is large."""
    found = []
    for states, wanted in zip(hidden, labels, strict=True):
        logits = model.logits(states[None].to(model.token_embedding.weight.dtype))[0]
        found.append(
            F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), wanted, reduction="none")
        )
    return torch.stack(found).float().cpu()
