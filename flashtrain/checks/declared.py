"""Whether what a model's layers and configuration declare is felt: windows, chunks, states, sinks,
soft caps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flashtrain.checks.check import FAULT, OK, Row, Subject, mask_of, relative, vocabulary_of
from flashtrain.checks.packed import Packed
from flashtrain.models.block import Block
from flashtrain.models.layer_spec import LayerSpec
from flashtrain.models.token_probe import EXACT

AT = 40  # the token whose state is changed
TOKENS = 131
FELT = 1e-6  # of a layer's largest output
CAPS = ("softcap", "soft_cap")


def declared_rows(subject: Subject, packed: Packed) -> Iterator[Row]:
    """Yield a row for each kind of layer, and one for all sinks and for each soft cap."""
    seen: set[Any] = set()
    for number, (layer, spec) in enumerate(layers_in(subject.model)):
        mixer = spec.mixer
        window, chunk = getattr(mixer, "window", None), getattr(mixer, "chunk", None)
        kind = (type(mixer), mixer.kind, window, chunk)
        if kind not in seen and mixer.kind not in ("mlp", "moe"):
            seen.add(kind)
            yield _reach(subject, packed, layer, number, mixer.kind, window, chunk)
    sinks = [one for name, one in subject.model.named_parameters() if "sink" in name.split(".")[-1]]
    batch = packed.of_one(vocabulary_of(subject.model), TOKENS)
    if sinks:
        before = subject.loss(batch)
        with _added(sinks):
            yield _felt("sinks felt", relative(before, subject.loss(batch)))
    for name in _caps(subject.model):
        before = subject.loss(batch)
        with _capped(subject.model, name):
            yield _felt(f"{name} felt", relative(before, subject.loss(batch)))


def layers_in(model: nn.Module) -> list[tuple[nn.Module, LayerSpec]]:
    """Return the layers of the decoder in a model with what they declare; [] where it is none that
    flashtrain knows."""
    if blocks := [(one, one.layer) for one in model.modules() if isinstance(one, Block)]:
        return blocks
    for one in (getattr(model, "module", None), *model.modules()):
        if hasattr(one, "get_output_embeddings") and hasattr(one, "config"):
            from flashtrain.integrations.huggingface_layers import decoder_layers
            from flashtrain.integrations.huggingface_specs import layers_of

            return list(zip(decoder_layers(one), layers_of(one), strict=True))
    return []


def _reach(
    subject: Subject,
    packed: Packed,
    layer: nn.Module,
    number: int,
    kind: str,
    window: int | None,
    chunk: int | None,
) -> Row:
    """Return whether a changed token reaches the tokens that see it, and no other."""
    tokens = max(TOKENS, AT + 2 * max(window or 0, chunk or 0))
    batch = packed.of_one(vocabulary_of(subject.model), tokens)
    before, *after = (_output(subject, layer, batch, change) for change in (0.0, -3.0, 2.0))
    moved = torch.stack([(one - before).abs().flatten(2).amax((0, 2)) for one in after]).amax(0)
    reached = (moved > FELT * before.abs().max()).nonzero()[:, 0]
    first, last = (int(reached[0]), int(reached[-1])) if len(reached) else (AT, -1)
    title, end = f"layer {number}: {kind}", tokens - 1
    if window is not None:
        title, end = f"layer {number}: window {window}", AT + window - 1
    elif chunk is not None:
        title, end = f"layer {number}: chunk {chunk}", AT // chunk * chunk + chunk - 1
    begin, exact = AT, kind == "attention"
    mask = subject.mask and mask_of(subject.mask, torch.arange(tokens)[None])
    if mask is not None:
        sees = mask.dense()[0, :, AT].nonzero()[:, 0]
        begin, end = int(sees[0]), min(end, int(sees[-1]))
    if first < begin or (exact and last != end) or (not exact and last <= AT):
        words = f"token {AT} reaches tokens {first} to {last}, expected {begin} to {end}"
        return Row(title, FAULT, None, words)
    return Row(title, OK, None, f"token {AT} reaches token {last}")


def _output(subject: Subject, layer: nn.Module, batch: dict, change: float) -> Tensor:
    """Return what a layer computes if, unless `change` is 0, its input is other at the token AT."""
    found: list[Tensor] = []

    def before(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        if change:
            hidden = hidden.clone()
            hidden[:, AT] = change * hidden[:, AT].flip(-1)
        return (
            ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        )

    def behind(_: Any, args: Any, output: Any) -> None:
        found.append(next(one for one in tree_leaves(output) if isinstance(one, Tensor)))

    hooks = [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(behind),
    ]
    try:
        subject.loss(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0].double()


def _felt(title: str, figure: float) -> Row:
    words = "a change of it changes nothing"
    return Row(title, OK if figure > EXACT else FAULT, figure, "" if figure > EXACT else words)


@contextmanager
def _added(parameters: list[nn.Parameter]) -> Iterator[None]:
    before = [one.detach().clone() for one in parameters]
    for one in parameters:
        one.data += 3.0
    try:
        yield
    finally:
        for one, value in zip(parameters, before, strict=True):
            one.data.copy_(value)


def _places(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of all modules and of their configurations."""
    modules = [getattr(model, "module", None), *model.modules()]
    configs = {id(one.config): one.config for one in modules if hasattr(one, "config")}
    return [vars(one) for one in (*modules, *configs.values()) if one is not None]


def _caps(model: nn.Module) -> list[str]:
    return sorted(
        {
            name
            for place in _places(model)
            for name, value in place.items()
            if any(one in name for one in CAPS) and isinstance(value, float) and value > 0
        }
    )


@contextmanager
def _capped(model: Any, name: str) -> Iterator[None]:
    """Within this context the soft cap of this name is so low that all scores feel it."""
    places = [(one, one[name]) for one in _places(model) if isinstance(one.get(name), float)]
    for place, value in places:
        # The map from states to logits must still be found (head_of).
        place[name] = min(value / 2, 0.5 if "final" in name else 0.02)
    try:
        with _head_read_again(model):
            yield
    finally:
        for place, value in places:
            place[name] = value


@contextmanager
def _head_read_again(model: Any) -> Iterator[None]:
    """Within this context a HuggingFaceDecoder computes with what its head is now."""
    before = getattr(model, "head", None)
    if hasattr(before, "softcap"):
        from flashtrain.integrations.huggingface_loss import head_of

        model.head = head_of(model.module)
    try:
        yield
    finally:
        if hasattr(before, "softcap"):
            model.head = before
