"""Activation checkpointing and feed-forwards in chunks of tokens, for any decoder
layer of transformers.

Shapes: B batch, S sequence, T tokens, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_mixers import RUNNING, using
from flashtrain.models.activation_checkpointing import (
    MemorySavings,
    checkpointed,
    compile_lean,
)
from flashtrain.models.feed_forward import are_plain, chunked_feed_forward

# Its names in transformers' layers.
FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")


def body_of(module: Any) -> tuple[str, nn.Module]:
    """Return (name, module) of the model's child that computes lm_head's input: the
    one with the embeddings."""
    # base_model_prefix names it in most models, but not in Llama 4's text decoder.
    embeddings = module.get_input_embeddings()
    return next(
        (name, body) for name, body in module.named_children() if embeddings in body.modules()
    )


def decoder_layers(module: Any) -> list[nn.Module]:
    """Return the layers of a transformers model, in order; UserError where they are not found."""
    count = module.config.get_text_config().num_hidden_layers
    for one in module.base_model.modules():
        if isinstance(one, nn.ModuleList) and len(one) == count:
            return list(one)
    raise UserError(
        f"{type(module).__name__} has no list of num_hidden_layers={count} layers: expected a "
        "decoder whose layers are in an nn.ModuleList."
    )


def first_position(module: Any) -> int:
    """Return the position of a document's first token: 0, in RoBERTa's family
    the padding index + 1."""
    named = body_of(module)[1].named_modules()
    tables = [one for name, one in named if isinstance(one, nn.Embedding) and "position" in name]
    return next((one.padding_idx + 1 for one in tables if one.padding_idx is not None), 0)


def feed_forward_of(layer: nn.Module) -> nn.Module | None:
    """Return a layer's feed-forward module, found by its name; None where there is none."""
    # Nemotron-H's layers are one thing each, which they all call mixer.
    alone = ("mixer",) if getattr(layer, "block_type", None) in FEED_FORWARD else ()
    found = (getattr(layer, name, None) for name in (*FEED_FORWARD, *alone))
    return next((part for part in found if isinstance(part, nn.Module)), None)


def gated_matrices(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """Return (gate, up, down) of a SwiGLU feed-forward, as chunked_feed_forward computes
    it; None for other kinds."""
    parts: list[Any] = [
        getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")
    ]
    act = type(getattr(module, "act_fn", None)).__name__
    usual = act in ("SiLU", "SiLUActivation") and len(list(module.children())) == 4
    usual = usual and not getattr(module, "residual_dropout", 0.0)  # SeedOss has dropout after it
    return (parts[0], parts[1], parts[2]) if usual and are_plain(*parts) else None


class Layer:
    """Replaces a layer's forward by the same computation under the model's memory
    options (MemorySavings)."""

    # In compiled layers, maps (mask, hidden_states, arguments) to the mask with
    # its packed documents.
    settle: Callable[..., Any] | None = None

    def __init__(self, layer: nn.Module) -> None:
        self.eager = self.compute = layer.forward  # compute: perhaps compiled
        self.savings = MemorySavings()
        found = feed_forward_of(layer)
        self.feed_forward = None if found is None else ChunkedFeedForward(found)
        weights = [one.p for one in layer.modules() if isinstance(one, nn.Dropout)]
        # Random draws without a module of their own, such as attention_dropout and
        # router_jitter_noise.
        weights += [
            value
            for one in layer.modules()
            for name, value in vars(one).items()
            if "drop" in name or "jitter" in name
        ]
        numbers = [
            float(one)
            for one in weights
            if isinstance(one, int | float) and not isinstance(one, bool)
        ]
        self.dropout = max(numbers, default=0.0)
        self.layer = layer
        layer.forward = self

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these memory options (activation checkpointing, offloading, chunks) from now on."""
        self.savings = savings
        if self.feed_forward is not None:
            self.feed_forward.chunk, self.feed_forward.plain = savings.ffn_chunk, {}

    def compile(self, settle: Callable[..., Any] | None, **options: Any) -> None:
        """Compile the layer by compile_lean with these options.

        Args:
            settle: Maps (mask, hidden_states, arguments) to the mask with its packed documents,
                before the compiled code runs; None: the mask is passed on as it is.
        """
        self.compute, self.settle = compile_lean(self.eager, **options), settle
        if self.feed_forward is not None:
            self.feed_forward.compile(**options)

    def __call__(self, hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
        if any(hasattr(one, "get_seq_length") for one in (*rest, *named.values())):
            # With a cache every token would be recompiled.
            return self.eager(hidden_states, *rest, **named)
        if self.settle is not None and "attention_mask" in named:
            named["attention_mask"] = self.settle(named["attention_mask"], hidden_states, named)

        rows = RUNNING.get()

        def again(x: Tensor) -> Any:
            if self.feed_forward is not None:  # other calls may have changed it
                self.feed_forward.expect(x.shape[:-1].numel())
            with using(rows):
                return self.compute(x, *rest, **named)

        if self.savings.checkpointing == "none" or not torch.is_grad_enabled():
            return again(hidden_states)
        dropout = self.dropout if self.layer.training else 0.0
        return checkpointed(again, hidden_states, savings=self.savings, dropout=dropout)


class ChunkedFeedForward:
    """Replaces a feed-forward's forward by one that computes a chunk of tokens at a time and
    stores only its input."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.compute = module, module.forward
        self.by_itself = self.compute  # compiled separately from its layer
        # `_is_plain` by training mode, since the last save_memory.
        self.plain: dict[bool, bool] = {}
        self.chunk: int | None = None  # the number of tokens in a chunk; None: all tokens at once
        self.whole = True
        # Whether the feed-forward has a router whose logits the balancing loss reads.
        self.routes = False
        # torch.compile takes a method for the same in every layer; it would
        # recompile for each object.
        module.forward = self.__call__

    def compile(self, **options: Any) -> None:
        """Compile the computation of one chunk by torch.compile with these options."""
        self.by_itself = torch.compile(self.compute, **options)

    def expect(self, tokens: int) -> None:
        """Decide whether the next call, for `tokens` tokens, runs in chunks; call this
        outside of compiled code."""
        # A compiled layer must not contain the loop over chunks: torch.compile would unroll it, and
        # the chunks' activations would be in memory together.
        whole = (
            self.chunk is None or tokens <= self.chunk or gated_matrices(self.module) is not None
        )
        if whole != self.whole:
            self.whole, self.module.forward = whole, self.__call__ if whole else self.in_chunks

    def __call__(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        if self.chunk is None or x.shape[:-1].numel() <= self.chunk:
            return self.compute(x, *rest, **named)
        gated = gated_matrices(self.module)
        if gated is None:  # it was called without its layer
            return (self.compute if torch.compiler.is_compiling() else self.in_chunks)(
                x, *rest, **named
            )
        gate, up, down = gated
        weight = torch.cat((gate.weight, up.weight))  # as in our gated feed-forward
        bias = None if gate.bias is None else torch.cat((gate.bias, up.bias))
        return chunked_feed_forward(
            x, weight, bias, down.weight, down.bias, activation="swiglu", chunk=self.chunk
        )

    @torch.compiler.disable
    def in_chunks(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        """Compute the feed-forward of x (..., E) chunk by chunk, for any kind of feed-forward."""
        if self.chunk is None or x.shape[:-1].numel() <= self.chunk:
            return self.compute(x, *rest, **named)
        flat = x.reshape(1, -1, x.shape[-1])
        if (
            torch.is_grad_enabled()
            and not (rest or named or self.routes)
            and self._is_plain(flat[:, :1])
        ):
            saved = _Saved.apply(flat)
            return _OneByOne.apply(self, saved.grad_fn, saved, *self.trained()).view(
                *x.shape[:-1], -1
            )

        def once(part: Tensor) -> Any:
            return self.by_itself(part, *rest, **named)

        again = partial(checkpoint, once, use_reentrant=False) if torch.is_grad_enabled() else once
        found = [again(part) for part in flat.split(self.chunk, dim=1)]
        if isinstance(found[0], tuple):  # experts also return their routing
            parts = zip(*found, strict=True)
            return tuple(
                torch.cat(one, dim=-2) if one[0].dim() < 3 else _joined(one, x) for one in parts
            )
        return _joined(found, x)

    def trained(self) -> list[nn.Parameter]:
        """Return the feed-forward's parameters that require gradients."""
        return [one for one in self.module.parameters() if one.requires_grad]

    def _is_plain(self, token: Tensor) -> bool:
        """Return whether the feed-forward draws no random numbers and returns one tensor; a trial
        with one token (1, 1, E) finds out."""
        if token.is_meta:
            return False  # draws cannot be detected there
        training, devices = self.module.training, [token.device] if token.is_cuda else []
        if training not in self.plain:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices),
                torch.autocast(**_autocast_of(token)),
            ):
                before = _random_states(devices)
                found = self.compute(token.clone())
                drew = not all(map(torch.equal, before, _random_states(devices)))
            self.plain[training] = isinstance(found, Tensor) and not drew
        return self.plain[training]


class _Saved(torch.autograd.Function):
    """Returns x and saves it for the backward. When a checkpointed layer is recomputed, torch stops
    at the last saved tensor: here, before the feed-forward, which saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


class _OneByOne(torch.autograd.Function):
    """Computes a feed-forward of x (1, T, E) in chunks; the backward recomputes each chunk and
    frees it before the next."""

    # saved is the node of `_Saved` that holds x (None: x needs no gradient); the gradients of the
    # weights, those that need any, are summed in float32 (float64 for float64).
    @staticmethod
    def forward(
        ctx: Any, owner: ChunkedFeedForward, saved: Any, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.owner, ctx.saved, ctx.chunk, ctx.autocast = owner, saved, owner.chunk, _autocast_of(x)
        if saved is None:
            ctx.save_for_backward(x)
        out = x
        with torch.autocast(**ctx.autocast):
            for number, part in enumerate(x.split(ctx.chunk, dim=1)):
                found = owner.by_itself(part)
                if number == 0:
                    out = found.new_empty(1, x.shape[1], found.shape[-1])
                out[:, number * ctx.chunk : number * ctx.chunk + part.shape[1]] = found
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        (x,) = ctx.saved_tensors if ctx.saved is None else ctx.saved.saved_tensors
        weights = ctx.owner.trained()
        dx = torch.empty_like(x) if ctx.needs_input_grad[2] else None
        sums: list[Tensor | None] = [None] * len(weights)  # None: an expert without tokens
        for number, (part, gradient) in enumerate(
            zip(x.split(ctx.chunk, 1), dout.split(ctx.chunk, 1), strict=True)
        ):
            given = part.detach().requires_grad_(dx is not None)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                found = ctx.owner.by_itself(given)
            inputs = [*weights, given] if dx is not None else weights
            made = torch.autograd.grad(found, inputs, gradient.to(found.dtype), allow_unused=True)
            for at, one in enumerate(made[: len(weights)]):
                if one is not None:
                    exact, before = one.to(torch.promote_types(one.dtype, torch.float32)), sums[at]
                    sums[at] = exact if before is None else before.add_(exact)
            if dx is not None:
                dx[:, number * ctx.chunk : number * ctx.chunk + part.shape[1]] = made[-1]
        dweights = [
            None if one is None else one.to(weight.dtype)
            for one, weight in zip(sums, weights, strict=True)
        ]
        return (None, None, dx, *dweights)


def _autocast_of(x: Tensor) -> dict[str, Any]:
    """Return torch.autocast's current arguments, but with its cache off, since the cache would
    reuse weights that were cast without gradients."""
    device = x.device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": False}


def _random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _joined(parts: Any, like: Tensor) -> Tensor:
    return torch.cat(list(parts), dim=1).view(*like.shape[:-1], -1)
