"""The layers that `model.pattern` names: a list of words that is repeated over the layers.

    [window:1024, window:1024, full]

A word is full (attention to all earlier tokens), window:TOKENS, chunk:TOKENS (to those of its own
chunk), nope (full, without positions; Kazemnejad et al. 2023), or the kind of a registered mixer:
KIND, or KIND:VALUE if it has a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashtrain.errors import UserError
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import FeedForwardSpec, LayerSpec
from flashtrain.models.mixer import MixerSpec
from flashtrain.registry import component

ATTENTION = ("full", "nope", "window", "chunk")


def layers_of_pattern(
    pattern: Sequence[str], count: int, attention: AttentionSpec, inner: FeedForwardSpec
) -> tuple[LayerSpec, ...]:
    """Return `count` layers whose mixers follow a pattern.

    Args:
        pattern: The words.
        attention: Attention to all earlier tokens, with the heads that every
            layer of attention has.
        inner: The feed-forward of every layer.

    Raises:
        UserError: A word is unknown, or its value is not as expected.
    """
    mixers = [mixer_of(word, attention) for word in pattern]
    return tuple(LayerSpec(mixers[number % len(mixers)], inner) for number in range(count))


def mixer_of(word: str, attention: AttentionSpec) -> MixerSpec:
    """Return the mixer of one word of a pattern; the arguments are those of layers_of_pattern."""
    kind, _, value = str(word).partition(":")
    if kind not in ATTENTION:
        build: Any = component("mixer", kind, ATTENTION, "word of model.pattern")
        return build.of_pattern(value or None, attention)
    sized = kind in ("window", "chunk")
    if sized and value.isdigit() and int(value):
        chosen: Any = {kind: int(value)}
        return replace(attention, **chosen)
    if sized or value:
        raise UserError(
            f"model.pattern has {word}. Expected full, nope, window:TOKENS or chunk:TOKENS, such "
            "as window:1024."
        )
    if kind == "nope" and not attention.rotary:
        raise UserError(
            "model.pattern has nope, layers without positions. "
            "Set model.positions=rotary for the others."
        )
    return attention if kind == "full" else replace(attention, rotary=False)
