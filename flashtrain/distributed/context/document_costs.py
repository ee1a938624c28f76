"""Estimate the seconds that a document takes, whole on one rank or divided over several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from torch import nn

from flashtrain.distributed.context.cost import NETWORK, NVLINK, expected_seconds, linear_seconds
from flashtrain.distributed.context.methods import ALL_GATHER, AUTO, choose_method
from flashtrain.distributed.context.traffic import GRADIENT_BYTES, Sizes, near_ranks
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import LayerSpec, mixers
from flashtrain.models.trainable import Trainable

# FLOPs a second of all but attention: 0.45 to 0.52 of 989e12 (gpt2-two-gpus-h200.json and
# hf-speed-h200.json, whose attention is short).
TOKEN_FLOPS = 4.7e14
# Of a model whose shape is unknown: Llama-8B's attention, and the parameters of one of its layers.
USUAL, USUAL_LAYER = AttentionSpec(32, 8, 128), 2.2e8
RUNS = 2  # of a divided document that a rank holds in the layout zigzag


class DocumentCosts:
    """The seconds of a document in all layers, forward and backward, by cost.py's constants.

    A rank computes attention, token-wise parts and states of a layer one after the other, and
    waits for others between layers at most: what is to be equal is their sum.

    Args:
        layers: the model's layers.
        token_flops: FLOPs of a token, forward and backward, without attention.
        near: the number of neighboring ranks that are on one machine; 1: it does not matter.
    """

    def __init__(self, layers: Sequence[LayerSpec], token_flops: float, near: int = 1) -> None:
        self.token = token_flops / TOKEN_FLOPS  # seconds
        self.near = near
        self.attentions = Counter[AttentionSpec](mixers(layers, AttentionSpec))
        self.passed = sum(getattr(one.mixer, "passed", None) or 0 for one in layers)
        self.seconds = lru_cache(maxsize=1 << 16)(self._seconds)

    def exchange(self, ranks: int) -> float:
        """Return the seconds that an exchange between so many ranks takes whatever is exchanged,
        which `seconds` has for each document, and documents in one group need once."""
        return self.seconds(1, ranks) if ranks > 1 else 0.0

    def _seconds(self, length: int, ranks: int = 1) -> float:
        """Return the seconds of each of the ranks among which a document of `length` tokens is
        divided evenly, as if it were alone."""
        held, near = -(-length // ranks), 1 if self.near == 1 else near_ranks(ranks, self.near)
        total = held * self.token
        for spec, count in self.attentions.items():
            sizes = Sizes(
                ranks, spec.heads, spec.kv_heads, spec.head_dim, held, 2, near, spec.seen(length)
            )
            if ranks == 1:
                total += count * linear_seconds(sizes)
                continue
            choice = choose_method(AUTO, sizes, hybrid=False)
            gathers = choice.method == ALL_GATHER
            total += count * expected_seconds(sizes, choice.heads_degree, gathers=gathers)
        if ranks > 1:  # states forward, their gradients backward
            speed = NVLINK if near in (1, ranks) else NETWORK
            total += 2 * GRADIENT_BYTES * self.passed * RUNS * (ranks - 1) / speed
        return total


def costs_of(module: nn.Module, near: int = 1) -> DocumentCosts:
    """Return the costs of the model in a module; of one whose sizes are unknown, by its number of
    parameters. near: as in DocumentCosts."""
    for model in module.modules():
        if isinstance(model, Trainable) and model.shape is not None:
            flops = model.flops_per_token(1)
            if not math.isnan(flops):
                return DocumentCosts(model.shape.layers, flops, near)
    count = sum(one.numel() for one in module.parameters())
    costs = DocumentCosts((), 6.0 * count, near)
    costs.attentions[USUAL] = max(1, round(count / USUAL_LAYER))
    return costs
