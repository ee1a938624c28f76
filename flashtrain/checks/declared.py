"""Whether what a model's layers declare is felt: windows, chunks, states, sinks, soft caps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flashtrain.checks.packed import ROUNDING, Batch, Packed
from flashtrain.checks.questions import FAULT, NONE, OK, Row, loss_of, vocabulary_of
from flashtrain.distributed.context.batch import LABELS
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain.integrations.huggingface_specs import FEED_FORWARDS, layers_of
from flashtrain.models.generation import row_mask
from flashtrain.tasks.language.task import LanguageModel

AT, TOKENS = 40, 131  # the token that is changed, of so many
FELT = 1e-6  # of a layer's mean output: trained ones have few very large numbers
NEAR = 8  # of so many last tokens of a row one feels the first ones, however sharp the attention
LOW_CAP = 0.02  # which all scores feel
MOST_TOKENS = 20_000  # of a row; chunks of 8,192 fit
Kind = tuple[str, int | None, int | None]  # of a mixer, its window, its chunk


def declared(model: nn.Module, packed: Packed) -> Iterator[Row]:
    """Yield a row for each kind of layer, and one for the sinks and for each soft cap."""
    seen: set[Kind] = set()
    layers = layers_in(model)
    for number, (layer, spec) in enumerate(layers):
        mixer = spec.mixer
        kind = mixer.kind, getattr(mixer, "window", None), getattr(mixer, "chunk", None)
        if kind not in seen and mixer.kind not in FEED_FORWARDS:
            seen.add(kind)
            yield _reach(model, packed, layer, number, kind)
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    configs = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
    places = [vars(one) for one in (*model.modules(), *configs.values())]
    names |= {name for one in places for name, x in one.items() if isinstance(x, float) and x > 0}
    for name in sorted(names if layers else ()):
        # A final cap bounds logits, and not attention.
        if "sink" in name or ("softcap" in name and "final" not in name):
            yield _felt(model, packed, layers[-1][0], name, places)


def _felt(
    model: nn.Module, packed: Packed, last: nn.Module, name: str, places: list[dict[str, Any]]
) -> Row:
    """Return whether another value of these parameters, or of this attribute, changes what the last
    layer computes."""
    batch = packed.of_one(vocabulary_of(model), TOKENS)
    given = [(one, one[name]) for one in places if isinstance(one.get(name), float)]
    sinks = [x for full, x in model.named_parameters() if full.rpartition(".")[2] == name]
    kept, before = [x.detach().clone() for x in sinks], _output(model, last, batch, 0.0)
    try:
        for one, _ in given:
            one[name] = LOW_CAP
        for x in sinks:
            x.data += 3.0
        felt = not torch.equal(before, _output(model, last, batch, 0.0))
    finally:
        for one, value in given:
            one[name] = value
        for x, old in zip(sinks, kept, strict=True):
            x.data.copy_(old)
    return Row(f"{name} felt", OK if felt else FAULT, "" if felt else "it changes nothing")


def layers_in(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the layers of the decoder in a model with their specs; [] where none is known."""
    one: Any
    for one in model.modules():
        if hasattr(one, "blocks") and getattr(one, "shape", None) is not None:
            return list(zip(one.blocks, one.shape.layers, strict=True))
        if hasattr(one, "get_output_embeddings") and hasattr(one, "base_model"):
            return list(zip(decoder_layers(one), layers_of(one), strict=True))
    return []


def _reach(model: Any, packed: Packed, layer: nn.Module, number: int, of: Kind) -> Row:
    """Return whether a changed token reaches the tokens that see it, and no other."""
    kind, window, chunk = of
    tokens = max(TOKENS, AT + 2 * max(window or 0, chunk or 0))
    title = kind if chunk is None else f"chunk {chunk}"
    title = title if window is None else f"window {window}"
    if tokens > MOST_TOKENS:
        return Row(f"layer {number}: {title}", NONE, f"it needs a row of {tokens:,} tokens")
    batch = packed.of_one(vocabulary_of(model), tokens)
    before, *after = (_output(model, layer, batch, change) for change in (0.0, -3.0, 2.0))
    moved = torch.stack([(one - before).abs().amax(1) for one in after]).amax(0)
    reached = (moved > FELT * before.abs().mean()).nonzero()[:, 0].tolist() or [AT]
    begin, end = AT, tokens - 1
    least = end - NEAR if kind == "attention" else AT + 1  # a state may fade
    if window is not None:
        end = least = AT + window - 1
    elif chunk is not None:
        end = least = AT // chunk * chunk + chunk - 1
    if isinstance(model, LanguageModel) and model.mask is not None:
        title += ", masked"
        mask: Any = row_mask(model.mask, tokens, torch.device("cpu"))
        sees = mask.dense()[0, :, AT].nonzero()[:, 0].tolist()
        begin, end = sees[0], min(end, sees[-1])
        least = min(least, end)
    first = min(AT, begin + NEAR)  # a mask may show a token to those before it
    if packed.rounding != ROUNDING:  # one token of many is rounded away
        least, first = AT + 1, AT
    words = f"token {AT} reaches tokens {reached[0]} to {reached[-1]}"
    right = begin <= reached[0] <= first and least <= reached[-1] <= end
    words += "" if right else f", expected {begin} to {end}"
    return Row(f"layer {number}: {title}", OK if right else FAULT, words)


def _output(model: nn.Module, layer: nn.Module, batch: Batch, change: float) -> Tensor:
    """Return a layer's output (S, others); unless `change` is 0, for other input at token AT."""
    found: list[Tensor] = []
    tokens = batch[LABELS].shape[1]  # of the second dimension, or behind streams (Gemma 3n)

    def before(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if change:
            one = hidden.movedim(hidden.shape.index(tokens), 0)[AT]
            one.copy_(change * one.flip(-1))

    def behind(_: Any, args: Any, output: Any) -> None:
        x = next(one for one in tree_leaves(output) if isinstance(one, Tensor)).double()
        found.append(x.movedim(x.shape.index(tokens), 0).flatten(1))

    with (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(behind),
    ):
        loss_of(model, batch)
    return found[0]
