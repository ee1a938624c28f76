"""One layer: a mixer (such as attention), norms and a feed-forward.

Shapes: B batch, S sequence, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, at_least, between, one_of
from flashtrain.models.activation_checkpointing import (
    MemorySavings,
    checkpointed,
    compile_lean,
)
from flashtrain.models.attention_functions import AnyMask, PackedSequences
from flashtrain.models.feed_forward import FeedForward
from flashtrain.models.layer_spec import ExpertsSpec, LayerSpec
from flashtrain.models.mixer import Mixer, Rotary

NORMS = ("layernorm", "rmsnorm")
EPSILON = 1e-5  # GPT-2's
INITIAL_STD = 0.02  # GPT-2's and BERT's

Model = TypeVar("Model", bound=nn.Module)


def normalization(
    norm: str, embed: int, bias: bool, epsilon: float = EPSILON
) -> nn.LayerNorm | nn.RMSNorm:
    """Make the norm "layernorm" or "rmsnorm" of width `embed` (RMSNorm, Zhang and
    Sennrich 2019, has no bias)."""
    norms: dict[str, Any] = {"layernorm": partial(nn.LayerNorm, bias=bias), "rmsnorm": nn.RMSNorm}
    return norms[norm](embed, eps=epsilon)


def norm_of(config: Any) -> nn.LayerNorm | nn.RMSNorm:
    """Make the norm that a model's configuration names: its norm, embed, bias and epsilon."""
    return normalization(config.norm, config.embed, config.bias, config.epsilon)


def start_normal(model: Model) -> Model:
    """Initialize a module as GPT-2 and BERT do (weights normal(0, 0.02), biases 0, norms 1 and 0,
    others as they do themselves), and return it."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif module is not model and (reset := getattr(module, "reset_parameters", None)):
            reset()
    return model


def check_config(config: Any, sizes: Sequence[str], names: Mapping[str, Iterable[str]]) -> None:
    """Raise UserError for a size below 1, too few embedding rows, a dropout outside
    [0, 1) or an unknown name.

    Args:
        config: A model's configuration, with vocab_size and dropout.
        sizes: The fields that must be at least 1.
        names: The fields that are names, with their possible values.
    """
    for name in sizes:
        at_least(name, getattr(config, name), 1)
    at_least("vocab_rows", getattr(config, "vocab_rows", config.vocab_size), config.vocab_size)
    between("dropout", config.dropout, 0, 1, include_high=False)
    for name, possible in names.items():
        one_of(name, getattr(config, name), possible)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


class Block(nn.Module):
    """Pre-norm block (GPT-2): x + mixer(norm(x)), then x + feed_forward(norm(x)).

    The submodules of the mixer and its norm have the mixer's kind in their names:
    `attention`, `attention_norm`.

    Args:
        embed: Width E.
        layer: The mixer and the feed-forward.
        norm: "layernorm" or "rmsnorm".
        bias: Whether projections and LayerNorm have biases.
        dropout: Dropout probability for attention weights and for both branches
            before they are added.
        causal, attention: See Attention.
        rotary: A function from a head dimension to the module that rotates queries and keys
            (None: no layer rotates them).
    """

    def __init__(
        self,
        embed: int,
        layer: LayerSpec,
        *,
        norm: str = "layernorm",
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
        attention: str = "flash",
        rotary: Rotary | None = None,
        epsilon: float = EPSILON,
    ) -> None:
        super().__init__()
        self.layer = layer
        kind, inner = layer.mixer.kind, layer.feed_forward
        options = {"causal": causal, "bias": bias, "dropout": dropout, "attention": attention}
        self.add_module(f"{kind}_norm", normalization(norm, embed, bias, epsilon))
        self.add_module(kind, layer.mixer.make(embed, rotary=rotary, **options))
        self.feed_forward_norm = normalization(norm, embed, bias, epsilon)
        if isinstance(inner, ExpertsSpec):
            raise UserError(
                f"a mixture of {inner.experts} experts: flashtrain's own decoders have none. "
                "Use recipe=hf."
            )
        self.feed_forward = FeedForward(embed, inner.width, inner.activation, bias)
        self.dropout = nn.Dropout(dropout)
        self.savings = MemorySavings()
        self._compiled: Callable[..., Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | PackedSequences | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Compute the block's output (B, S, E) from x (B, S, E); positions,
        mask, cache: see Mixer."""
        compute = self.compute if self._compiled is None or cache is not None else self._compiled
        if self.savings.checkpointing == "none" or cache is not None or not torch.is_grad_enabled():
            return compute(x, positions=positions, mask=mask, cache=cache)
        # Of the branches too, whose modules draw where the mixer has no dropout.
        dropout = max(self.mixer.active_dropout, self.dropout.p * self.training)
        return checkpointed(
            compute, x, savings=self.savings, dropout=dropout, positions=positions, mask=mask
        )

    def compute(self, x: Tensor, **options: Any) -> Tensor:
        """Compute the block without activation checkpointing; options: the
        mixer's keyword arguments."""
        x = x + self.dropout(self.mixer(self.mixer_norm(x), **options))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    @property
    def mixer(self) -> Mixer:
        """The layer's mixer."""
        return cast(Mixer, self._modules[self.layer.mixer.kind])

    @property
    def mixer_norm(self) -> nn.Module:
        """The norm before the mixer; in a post-norm block, the norm after it."""
        return cast(nn.Module, self._modules[f"{self.layer.mixer.kind}_norm"])

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these memory options (activation checkpointing, offloading, chunks) from now on."""
        self.savings = savings
        self.feed_forward.chunk = savings.ffn_chunk

    def compile_inside(self, **options: Any) -> None:
        """Compile `compute` by compile_lean with these options; checkpointing stays
        outside of compiled code."""
        if self.layer.mixer.crosses_devices == "state":
            options["fullgraph"] = False  # a recurrence breaks the graph
        self._compiled = compile_lean(self.compute, **options)

    def residual_projections(self) -> tuple[nn.Linear, nn.Linear]:
        """Return the two layers that write into the residual stream (GPT-2 initializes them
        smaller in deep models)."""
        return self.mixer.output, self.feed_forward.down


class PostNormBlock(Block):
    """Post-norm Transformer block (Vaswani et al. 2017; BERT): a norm follows each
    sum of x and a branch.

    The arguments are Block's. Sums have the input's dtype, also where norms under
    autocast return float32.
    """

    def compute(self, x: Tensor, **options: Any) -> Tensor:
        """Compute norm(x + mixer(x)), then norm(x + feed_forward(x)), from x
        (B, S, E) to (B, S, E)."""
        dtype = x.dtype
        x = self.mixer_norm(x + self.dropout(self.mixer(x, **options))).to(dtype)
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))).to(dtype)


def make_blocks(config: Any, layers: Iterable[LayerSpec], **options: Any) -> nn.ModuleList:
    """Make a Block or, if layer.norms is "post", a PostNormBlock for each layer, with the norm,
    bias, dropout and epsilon of `config`; options: Block's other keyword arguments."""
    kinds = {"pre": Block, "post": PostNormBlock}
    options |= {name: getattr(config, name) for name in ("norm", "bias", "dropout", "epsilon")}
    return nn.ModuleList(kinds[layer.norms](config.embed, layer, **options) for layer in layers)
