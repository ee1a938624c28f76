"""A decoder layer of transformers with our memory savings around it, whatever its class is.

Shapes: B batch, S sequence, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashtrain.errors import UserError
from flashtrain.models.block import SwiGLUFeedForward
from flashtrain.models.memory_savings import MemorySavings, checkpointed, feed_forward_pieces

FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")  # what transformers' layers call it


def decoder_layers(module: Any) -> list[nn.Module]:
    """The layers of a transformers model, from the first to the last. UserError: they are not found."""
    count = module.config.get_text_config().num_hidden_layers
    for one in module.base_model.modules():
        if isinstance(one, nn.ModuleList) and len(one) == count:
            return list(one)
    raise UserError(f"{type(module).__name__} has no list of {count} layers, as its configuration says.")


class Layer:
    """Stands for a layer's forward: what it computed before, under the savings of the moment.

    compute: the layer's own forward, or a compiled one. feed_forward: the part of it that may see its tokens in pieces.
    settle: in compiled layers, the mask (None: causal) with its packed documents, by (mask, hidden_states, arguments).
    """

    settle: Callable[..., Any] | None = None

    def __init__(self, layer: nn.Module) -> None:
        self.compute: Callable[..., Any] = layer.forward
        self.savings = MemorySavings()
        found = [part for name in FEED_FORWARD if isinstance(part := getattr(layer, name, None), nn.Module)]
        self.feed_forward = Pieces(found[0]) if found else None
        weights = [one.p for one in layer.modules() if isinstance(one, nn.Dropout)]
        weights += [getattr(one, "attention_dropout", 0.0) for one in layer.modules()]
        self.dropout = max((float(one) for one in weights if isinstance(one, int | float)), default=0.0)
        self.layer = layer
        layer.forward = self

    def save_memory(self, savings: MemorySavings) -> None:
        """From now on compute with these savings."""
        self.savings = savings
        if self.feed_forward is not None:
            self.feed_forward.chunk = savings.ffn_chunk

    def compile(self, settle: Callable[..., Any] | None, **options: Any) -> None:
        """From now on through torch.compile."""
        self.compute, self.settle = torch.compile(self.compute, **options), settle

    def __call__(self, hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
        if self.settle is not None and "attention_mask" in named:
            named["attention_mask"] = self.settle(named["attention_mask"], hidden_states, named)
        if self.savings.checkpointing == "none" or not torch.is_grad_enabled():
            return self.compute(hidden_states, *rest, **named)

        def again(x: Tensor) -> Any:
            return self.compute(x, *rest, **named)

        dropout = self.dropout if self.layer.training else 0.0
        return checkpointed(again, hidden_states, savings=self.savings, dropout=dropout)


class Pieces:
    """Stands for a feed-forward's forward: `chunk` tokens at a time (None: all), of which nothing inside is kept."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.compute = module, module.forward
        self.chunk: int | None = None
        # A method, which torch.compile takes for the same in every layer: it would compile each anew for its object.
        module.forward = self.__call__

    def __call__(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        if self.chunk is None or x.shape[:-1].numel() <= self.chunk:
            return self.compute(x, *rest, **named)
        gated = self._gated()
        if gated is not None:
            return feed_forward_pieces(x, *gated, self.chunk)

        def once(piece: Tensor) -> Any:
            return self.compute(piece, *rest, **named)

        found = []
        for piece in x.reshape(1, -1, x.shape[-1]).split(self.chunk, dim=1):
            found.append(checkpoint(once, piece, use_reentrant=False) if torch.is_grad_enabled() else once(piece))
        if isinstance(found[0], tuple):  # experts also say where they sent each token
            parts = zip(*found, strict=True)
            return tuple(torch.cat(one, dim=-2) if one[0].dim() < 3 else _joined(one, x) for one in parts)
        return _joined(found, x)

    def _gated(self) -> tuple[Any, Any, str] | None:
        """(the two inner matrices as one, the outer, the activation) of the usual gated feed-forward, for the operator
        that adds its weights' gradients up in float32; None for any other."""
        parts: list[Any] = [getattr(self.module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        act = type(getattr(self.module, "act_fn", None)).__name__
        usual = act in ("SiLU", "SiLUActivation") and len(list(self.module.children())) == 4
        if not usual or not all(type(one) is nn.Linear for one in parts):
            return None
        gate, up, down = parts
        return _Joined(gate, up), down, SwiGLUFeedForward.name


class _Joined:
    """Two matrices that read the same input, as the one of a gated feed-forward of ours."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        self.weight = torch.cat((gate.weight, up.weight))
        self.bias = None if gate.bias is None else torch.cat((gate.bias, up.bias))


def _joined(pieces: Any, like: Tensor) -> Tensor:
    return torch.cat(list(pieces), dim=1).view(*like.shape[:-1], -1)
