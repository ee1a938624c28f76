"""Text generation from a trained decoder, and its extension to a longer context.

    config, state_dict = load_decoder("gpt2")                                # 1,024 learned positions
    config, state_dict = with_context(config, state_dict, 8192, interpolate=True)
    model = GPT2(config)
    model.load_state_dict(state_dict)

Shapes: B batch, S prompt length, V rows of the embedding table, E embedding width, C positions of a learned table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashtrain.errors import UserError, at_least, between
from flashtrain.models.gpt2 import GPT2Config
from flashtrain.models.positions import stretched
from flashtrain.models.trainable import Trainable
from flashtrain_kernels import Mask

# Called with the keywords documents and positions (B, S) integers, seqlen S and device; returns which tokens each token
# sees (None: the model's own causal rule).
MaskMaker = Callable[..., Mask | None]
LARGEST_TEMPERATURE = 1e6  # all tokens are equally likely at much lower ones
SMALLEST_TEMPERATURE = 1e-30  # near float32's smallest number; below it the likeliest token is taken, as at 0
POSITION_TABLE = "position_embedding.weight"


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
    """The prompt tokens (B, S) int64 followed by up to max_new_tokens more: (B, S + new) int64.

    A model sees at most its context. Of a longer prompt it reads the last `context` tokens. When the context is full,
    the last context // 2 tokens are read again as a new window, so that reading stays cheap on average.
    Generation runs in evaluation mode on the model's device; the model's mode is restored. A model on the meta device
    (transformers_decoder's) first loads its weights, on the prompt's device.

    Args:
        tokens: The prompt; rows of equal length, without padding.
        temperature: Divides the logits before sampling; 0 takes the likeliest token (greedy).
        top_k: Sample among the k likeliest tokens (None: all).
        seed: The same seed, model and device give the same tokens.
        end_of_text: One or several ids. A row that draws one is finished and filled with the first of them; generation
            ends when all rows are finished.
        mask: Which tokens each token sees, as LanguageModel takes it; the window counts as one document.

    Raises:
        UserError: A model that cannot generate, an empty prompt, tokens outside the vocabulary, options out of range,
            or logits of NaN or infinity.
    """
    shape = model.shape
    if shape is None or not model.generates:
        raise UserError(f"{type(model).__name__} cannot generate text: expected a decoder.")
    ends = [] if end_of_text is None else [end_of_text] if isinstance(end_of_text, int) else list(end_of_text)
    if tokens.dim() != 2 or not tokens.numel():
        raise UserError(f"prompt of shape {tuple(tokens.shape)}: expected (rows, tokens), at least one token a row.")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < shape.vocab_size:  # the table may have more rows
        raise UserError(f"tokens {int(tokens.min())} to {int(tokens.max())}: expected those below {shape.vocab_size}.")
    at_least("max_new_tokens", max_new_tokens, 0)
    between("temperature", temperature, 0, LARGEST_TEMPERATURE)
    at_least("top_k", top_k, 1)
    model.materialise(tokens.device)  # does nothing where it has its weights
    device, context = next(model.parameters()).device, shape.context
    tokens, closing = tokens.to(device), torch.tensor(ends, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    # The cache holds no more than these tokens: a whole context of a million would take tens of GiB for a few words.
    cache = model.new_cache(min(context, tokens.shape[1] + max_new_tokens))
    finished = torch.zeros(tokens.shape[0], 1, dtype=torch.bool, device=device)
    unread = tokens[:, -context:]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(max_new_tokens):
                if cache.length + unread.shape[1] > context:
                    cache.clear()
                    unread = tokens[:, -max(1, context // 2) :]
                seen = None if mask is None else row_mask(mask, cache.length + unread.shape[1], device, cache.length)
                options = {} if seen is None else {"mask": seen}
                logits = model(unread, cache=cache, last_only=True, **options)[:, 0]
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
    """The mask of one document of `seqlen` tokens, for its queries after the first `read`."""
    positions = torch.arange(seqlen, device=device)[None]
    mask = make(documents=torch.zeros_like(positions), positions=positions, seqlen=seqlen, device=device)
    return mask.select(positions[0, read:], positions[0]) if mask is not None and read else mask


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token per row, (B, 1), from logits (B, V)."""
    largest = logits.max(dim=-1, keepdim=True).values
    if not bool(largest.isfinite().all()):  # the largest of a row with a NaN is NaN
        raise UserError("the model outputs NaN or infinity: this checkpoint cannot be used.")
    if temperature < SMALLEST_TEMPERATURE:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - largest).float() / temperature  # at a small temperature the largest stays 0
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)


def with_context(
    config: GPT2Config,
    state_dict: dict[str, Tensor],
    context: int,
    *,
    interpolate: bool = False,
    rope_base: float | None = None,
    rope_factor: float | None = None,
) -> tuple[GPT2Config, dict[str, Tensor]]:
    """The configuration and state dict of a trained model for sequences of up to `context` tokens.

    Args:
        context: Tokens; no more than the model's context changes nothing.
        interpolate: Whether to stretch learned positions (C, E) to (context, E); without it they do not fit.
        rope_base, rope_factor: New values for rotary positions (None: unchanged).

    Raises:
        UserError: rope_base or rope_factor with learned positions.
    """
    rotary = config.positions == "rotary"
    for name, given in (("rope_base", rope_base), ("rope_factor", rope_factor)):
        if given is not None and not rotary:
            raise UserError(f"{name}={given:g} needs rotary positions, but this model has learned ones.")
    if rope_base is not None:
        config = replace(config, rope_base=rope_base)
    if rope_factor is not None:
        config = replace(config, rope_factor=rope_factor)
    if context <= config.context:
        return config, state_dict
    if not rotary and interpolate:
        state_dict = {**state_dict, POSITION_TABLE: stretched(state_dict[POSITION_TABLE], context)}
    return replace(config, context=context), state_dict
