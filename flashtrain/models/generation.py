"""Text generation from a trained decoder.

Shapes: B batch, S prompt length, V rows of the embedding table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtrain.errors import UserError, at_least, between
from flashtrain.models.trainable import Trainable
from flashtrain_kernels import Mask

# Called with the keywords documents and positions (B, S) integers, seqlen S and device; returns
# which tokens each token sees (None: the model's own causal rule).
MaskMaker = Callable[..., Mask | None]
MAX_TEMPERATURE = 1e6  # all tokens are equally likely at much lower ones
# Near float32's smallest number; below it the likeliest token is taken, as at 0.
MIN_TEMPERATURE = 1e-30


def generate(
    model: Trainable,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end_of_text: int | Sequence[int] | None = None,
    mask: MaskMaker | None = None,
) -> Tensor:
    """Generate up to max_new_tokens tokens after a prompt.

    A model sees at most its context. Of a longer prompt it reads the last `context` tokens. When
    the context is full, generation goes on with the last context // 2 tokens alone, which are read
    again, so that reading stays cheap. Generation runs in evaluation mode on the model's device;
    the model's mode is restored. A model on the meta device (transformers_decoder's) first loads
    its weights, on the prompt's device.

    Args:
        model: A model whose `generates` is true.
        tokens: The prompt, (B, S) int64; rows of equal length, without padding.
        max_new_tokens: The largest number of tokens to add to each row.
        temperature: Divides the logits before sampling; 0 takes the likeliest token (greedy).
        top_k: Sample among the k likeliest tokens (None: all).
        seed: The same seed, model and device give the same tokens.
        end_of_text: Token ids that end a text, one or several. A row that has drawn one is filled
            with the first of these ids; generation ends when all rows have ended.
        mask: Makes the mask of the tokens read so far, as of one document (None: the
            model's own causal rule).

    Returns:
        The prompt followed by the new tokens, (B, S + new) int64.

    Raises:
        UserError: The model cannot generate, the prompt is empty or outside the vocabulary, an
            option is out of range, or logits are NaN or infinite.
    """
    shape = model.shape
    if shape is None or not model.generates:
        raise UserError(f"{type(model).__name__} cannot generate text: expected a decoder.")
    ends = (
        []
        if end_of_text is None
        else [end_of_text]
        if isinstance(end_of_text, int)
        else list(end_of_text)
    )
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        given = (
            f"of shape {tuple(tokens.shape)}"
            if isinstance(tokens, Tensor)
            else f"is a {type(tokens).__name__}"
        )
        line = (
            "expected ids (rows, tokens), at least one token a row. "
            "Texts and messages need flashtrain.load(RUN)."
        )
        raise UserError(f"prompt {given}: {line}")
    # The table may have more rows.
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < shape.vocab_size:
        raise UserError(
            f"token ids {int(tokens.min())} to {int(tokens.max())}: "
            f"expected ids of at least 0 and below {shape.vocab_size}."
        )
    at_least("max_new_tokens", max_new_tokens, 0)
    between("temperature", temperature, 0, MAX_TEMPERATURE)
    at_least("top_k", top_k, 1)
    model.materialise(tokens.device)  # does nothing where it has its weights
    device, context = next(model.parameters()).device, shape.context
    tokens, closing = tokens.to(device), torch.tensor(ends, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    # The cache has room for no more than these tokens: a context of a million would take tens of
    # GiB for a few words.
    size = min(context, tokens.shape[1] + max_new_tokens)
    cache, read = model.new_cache(size), 0
    finished = torch.zeros(tokens.shape[0], 1, dtype=torch.bool, device=device)
    unread = tokens[:, -context:]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(max_new_tokens):
                if read + unread.shape[1] > context:
                    cache, read = model.new_cache(size), 0
                    unread = tokens[:, -max(1, context // 2) :]
                seen = (
                    None if mask is None else row_mask(mask, read + unread.shape[1], device, read)
                )
                options = {} if seen is None else {"mask": seen}
                logits = model(unread, cache=cache, last_only=True, **options)[:, 0]
                read += unread.shape[1]
                unread = _draw(logits, temperature, top_k, generator)
                if ends:
                    unread = unread.masked_fill(finished, ends[0])
                    finished |= torch.isin(unread, closing)
                tokens = torch.cat((tokens, unread), dim=1)
                if ends and bool(finished.all()):
                    break
    finally:
        model.train(was_training)
    return tokens


def row_mask(make: MaskMaker, seqlen: int, device: torch.device, read: int = 0) -> Mask | None:
    """Make the mask of one document of `seqlen` tokens, for the queries after
    the first `read` tokens."""
    positions = torch.arange(seqlen, device=device)[None]
    mask = make(
        documents=torch.zeros_like(positions), positions=positions, seqlen=seqlen, device=device
    )
    return mask.select(positions[0, read:], positions[0]) if mask is not None and read else mask


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """Sample one token per row, (B, 1), from logits (B, V)."""
    largest = logits.max(dim=-1, keepdim=True).values
    if not bool(largest.isfinite().all()):  # the largest of a row with a NaN is NaN
        raise UserError("the model outputs NaN or infinity. Use another checkpoint.")
    if temperature < MIN_TEMPERATURE:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - largest).float() / temperature  # at a small temperature the largest stays 0
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
