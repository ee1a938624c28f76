"""The interface between a run and the model that it trains on text.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.attention import Attention
from flashtrain.models.block import Block
from flashtrain.models.layer_spec import LayerSpec
from flashtrain_kernels.loss_head import IGNORED

if TYPE_CHECKING:
    from flashtrain.models.key_value_cache import KeyValueCache
    from flashtrain_kernels import Mask


class DecoderShape:
    """The sizes of a decoder, from which a run estimates memory, FLOPs and communication; a
    DecoderConfig is one."""

    vocab_size: int
    vocab_rows: int  # of the embedding table
    context: int
    embed: int
    layers: tuple[LayerSpec, ...]
    positions: str  # "learned" or "rotary"
    outside: int  # parameters outside the layers
    frozen: int  # parameters without gradients
    quantized: int  # of them, those stored in 4 bits

    def plain(self) -> dict[str, Any]:
        """Return plain values that a checkpoint stores, so that loading the checkpoint into
        another model is detected."""
        own: dict[str, Any] = asdict(self) if is_dataclass(self) else {}
        return {**own, "layers": [layer.plain() for layer in self.layers]}


# Methods that every model needs, with their signatures for messages.
NEEDED = {
    "loss": (
        "loss(tokens, labels, *, positions=None, mask=None) -> a scalar, "
        "the mean cross-entropy in nats"
    ),
    "flops_per_token": "flops_per_token(context=None) -> a number",
}


class Trainable(nn.Module):
    """A module that tasks.LanguageModel can train, such as Decoder or a model
    registered by a user's program.

    A model must have loss and flops_per_token. The other methods are optional: with them a
    run chooses the micro-batch and activation checkpointing by itself, compiles block by
    block, and prints a sample.
    """

    # Methods besides forward that a task calls: each gathers the weights that it needs where they
    # are sharded (FSDP2).
    forward_methods: tuple[str, ...] = ("loss",)
    # The routers' part of the latest loss, without its coefficient; logged.
    balancing_loss: Tensor | None = None
    # Whether it has new_cache, and its forward takes `cache` and `last_only`.
    generates: bool = False
    # Whether rows of unequal lengths decode together, in a KeyValueCache of LayerCaches.
    decodes_rows: bool = False
    seed: int | None = None  # of random weights; None: torch's
    residual: str = "weights"  # dtype of the residual stream under autocast: see Decoder
    savings = MemorySavings()  # of the latest save_memory

    # These are abstract for readers and type checkers: check_contract reports in one line which
    # of them are missing.
    @abstractmethod
    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Compute the mean cross-entropy in nats, a float32 scalar, over the labels
        (B, S) that are not -100.

        Args:
            tokens: Token ids, (B, S).
            labels: (B, S), already shifted: labels[b, s] is the token after tokens[b, s].
            positions: (B, S), each token's position in its document (None: 0, 1, ...).
            mask: Which tokens each token sees, in place of the model's own rule; on the
                tokens' device, not planned.
        """

    @abstractmethod
    def flops_per_token(self, context: int | None = None) -> float:
        """Return the model FLOPs of one token's forward and backward, for TFLOP/s and MFU; nan
        where they are unknown.

        Args:
            context: The length in tokens of the sequence that contains the token (None:
                the model's longest).
        """

    def token_losses(self, tokens: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """Compute each token's cross-entropy (B, S) in nats, float32, 0 without a
        label; arguments as in loss.

        For models whose loss has a `reduction`, as flashtrain's own and Hugging Face decoders.
        """
        return self.loss(tokens, labels, **given, reduction="none")  # type: ignore[call-arg]

    def parameter_count(self) -> int:
        """Count the parameters; a parameter that is used twice (a tied output head) counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def shape(self) -> DecoderShape | None:
        """The model's sizes, from which memory is estimated (None: unknown)."""
        return None

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these memory options from now on; UserError if any is on and the model is not made
        of flashtrain's blocks."""
        blocks = self._blocks()
        if savings != MemorySavings() and not blocks:
            raise UserError(
                f"{type(self).__name__} has no memory savings: its layers are not flashtrain's "
                "blocks. Set memory.activation_checkpointing=none, memory.offload=false, and "
                "memory.ffn_chunk and memory.loss_chunk to null."
            )
        self.savings = savings
        for number, block in enumerate(blocks):
            block.save_memory(savings.of_layer(number))

    def compile_blocks(self, **options: Any) -> bool:
        """Compile each block separately with these options of torch.compile; False where
        the model has no blocks."""
        blocks = self._blocks()
        # torch.compile compiles Block.compute once for each kind, and beyond its limit runs
        # what is new eagerly.
        kinds, limit = len({block.layer for block in blocks}), torch._dynamo.config.recompile_limit
        if kinds > limit:
            raise UserError(
                f"{kinds} kinds of layers, and torch.compile compiles at most {limit}. "
                "Use fewer in model.pattern, or trainer.compile=false."
            )
        for block in blocks:
            block.compile_inside(**options)
        return bool(blocks)

    def _blocks(self) -> list[Block]:
        return [module for module in self.modules() if isinstance(module, Block)]

    @property
    def recomputes_blocks(self) -> bool:
        """Whether no compiled graph may span several blocks: the backward recomputes whole ones, or
        recurrences break it."""
        states = any(block.layer.mixer.crosses_devices == "state" for block in self._blocks())
        return states or self.savings.checkpointing == "full" or self.savings.offload

    @property
    def end_ids(self) -> Sequence[int]:
        """The token ids that end generated text, from the files of the model's weights."""
        return ()

    @property
    def shares_sequences(self) -> bool | None:
        """Whether the model supports sequences sharded over devices (sharded_sequence.py).

        None: its attention does; whether its tokens see each other by anything else is
        probed in the first step.
        """
        return None if any(isinstance(module, Attention) for module in self.modules()) else False

    @property
    def can_generate(self) -> bool:
        """Whether it continues texts: it generates with a cache, or its forward returns logits."""
        return self.generates or type(inner(self)).forward is not nn.Module.forward

    def new_cache(self, tokens: int | None = None) -> KeyValueCache:
        """Make an empty cache of keys and values for `tokens` tokens (None:
        the model's context)."""
        raise NotImplementedError

    @property
    def keeps_part(self) -> bool:
        """Whether the state dict holds adapters only; the other weights are
        read from the base model."""
        return False

    def keep_in(self, precision: str) -> None:
        """Set the weights' dtypes for a precision, such as "bf16-true" (Lightning's names).

        A run calls this method before memory is estimated and before weights on
        the meta device are read.
        """

    def materialise(self, device: torch.device) -> None:
        """Put the weights of a model that is on the meta device, sharded or not, on `device`:
        load or initialize them."""

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Load a checkpoint's weights (CPU tensors); RuntimeError or UserError
        where they do not fit."""
        self.load_state_dict(weights)

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Have these weights (CPU tensors) once it has materialised."""
        self.fill(weights)

    def save(self, folder: Path) -> str | None:
        """Export the model for other programs; return in words how to load the export
        (None: not supported)."""
        return None


def check_contract(model: nn.Module, what: str, takes: Iterable[str] = ()) -> None:
    """Raise UserError where a model lacks a required method.

    Args:
        model: A model that a user's program registered.
        what: The model in words, for the message.
        takes: Check that its loss, or without one its forward, has these arguments, and no more.
    """
    missing = [
        signature
        for name, signature in NEEDED.items()
        if getattr(type(model), name, None) in (None, getattr(Trainable, name))
        and name not in vars(model)
    ]
    if takes:
        own = inner(model)
        known = inspect.signature(getattr(own, "loss", own.forward)).parameters
        lacks = set(takes) - set(known) and all(x.kind is not x.VAR_KEYWORD for x in known.values())
        missing = [f"{NEEDED['loss']}, which a mask or packed documents need"] if lacks else []
    if missing:
        raise UserError(
            f"{what} has no {'; no '.join(missing)}. See the example in docs/extend/add-a-model.md."
        )


def as_trainable(model: nn.Module) -> Trainable:
    """Return a Trainable for a model: the model itself, or a wrapper where it is another module.

    Args:
        model: A Trainable; or a module with its own `loss`, or whose forward maps tokens (B, S)
            to logits (B, S, V). The loss or forward must accept `positions` and `mask` where the
            run's settings need them.
    """
    return model if isinstance(model, Trainable) else _Wrapped(model)


def inner(model: nn.Module) -> nn.Module:
    """Return the module that was passed to as_trainable to make this model."""
    return model.module if isinstance(model, _Wrapped) else model


class _Wrapped(Trainable):
    """Any module as a Trainable. Its weights keep their names: state_dict is the module's own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    @property
    def shares_sequences(self) -> bool | None:
        return getattr(self.module, "shares_sequences", super().shares_sequences)

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        made = self.module(tokens, **options)
        return getattr(made, "logits", made)  # transformers' models return an output with them

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        given = {
            name: one for name, one in (("positions", positions), ("mask", mask)) if one is not None
        }
        own = getattr(self.module, "loss", None)
        if callable(own):
            return own(tokens, labels, **given)
        logits = self.forward(tokens, **given).float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)

    def flops_per_token(self, context: int | None = None) -> float:
        """Return what the module's own flops_per_token does; without one, 6 for each parameter,
        which leaves out attention's scores."""
        own = getattr(self.module, "flops_per_token", None)
        return own(context) if callable(own) else 6.0 * self.parameter_count()


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}module.")]:
        state[prefix + name[len(prefix) + 7 :]] = state.pop(name)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [
        name
        for name in state
        if name.startswith(prefix) and not name.startswith(f"{prefix}module.")
    ]:
        state[f"{prefix}module.{name[len(prefix) :]}"] = state.pop(name)
