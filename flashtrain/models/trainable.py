"""What a run asks of a model that it trains on text, whoever wrote it, and what the model may offer beside."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.attention import Attention
from flashtrain.models.memory_savings import MemorySavings

if TYPE_CHECKING:
    from flashtrain.models.cache import KeyValueCache
    from flashtrain_kernels import Mask


class DecoderShape(Protocol):
    """What a decoder's memory, and what its devices send each other, are estimated from. GPT2Config is one."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab_rows(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def positions(self) -> str: ...
    @property
    def head_dim(self) -> int: ...


class Trainable(nn.Module):
    """A module that tasks.LanguageModel can train. GPT2 is one; a model registered by a user's program is another.

    loss, parameter_count and flops_per_token are needed. What stands below them is offered by a model that has it: its
    run then chooses micro-batch and memory savings by itself, compiles block by block, and shows a sample.
    B batch, S sequence.
    """

    balancing_loss: Tensor | None = None  # of the routers, as the latest loss has it but for its coefficient; logged
    residual: str = "weights"  # what the sum of all branches is kept in under autocast: see GPT2

    # Abstract for readers and types: check_contract says in one line which of the three a model lacks.
    @abstractmethod
    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats, a float32 scalar, over the labels (B, S) that are not -100.

        tokens (B, S). positions: (B, S), where each token stands in its document; None: 0, 1, ... mask: which tokens
        each token sees, in place of the model's own rule; it lies on the tokens' device and has no plan yet.
        """

    @abstractmethod
    def parameter_count(self) -> int:
        """Parameters, each counted once."""

    @abstractmethod
    def flops_per_token(self, context: int | None = None) -> float:
        """Model FLOPs of one token's forward and backward at this context, for TFLOP/s and MFU."""

    @property
    def shape(self) -> DecoderShape | None:
        """By which its memory is estimated; None where that is not known."""
        return None

    def save_memory(self, savings: MemorySavings) -> None:
        """Train with less memory for activations from now on. UserError: savings that the model has not."""
        if savings != MemorySavings():
            raise UserError(f"{type(self).__name__} has no memory savings. Possible: memory=none.")

    def compile_blocks(self, **options: Any) -> bool:
        """Compile each block by itself with torch.compile's options. False where there are no blocks to compile."""
        return False

    @property
    def recomputes_blocks(self) -> bool:
        """Whether whole blocks are computed again in the backward, between which no compiled graph may reach."""
        return False

    @property
    def generates(self) -> bool:
        """Whether it writes text: new_cache, and a forward that takes `cache` and `last_only`, as GPT2's does."""
        return False

    @property
    def end_ids(self) -> Sequence[int]:
        """The ids at which what it writes ends, by the files that its weights come from."""
        return ()

    @property
    def shares_sequences(self) -> bool:
        """Whether all its attention asks the spread sequence in force (models/cache.py), so that devices may share
        one."""
        return any(isinstance(module, Attention) for module in self.modules())

    def new_cache(self, tokens: int | None = None) -> KeyValueCache:
        """An empty cache of keys and values for so many tokens (None: its context)."""
        raise NotImplementedError

    @property
    def keeps_part(self) -> bool:
        """Whether its state holds what is trained alone, and all else comes from where the model began (adapters)."""
        return False

    def keep_in(self, precision: str) -> None:
        """Told the run's precision (Lightning's name) before memory is estimated, or any weight of the meta device
        read."""

    def materialise(self, device: torch.device) -> None:
        """Give weights that were built on the meta device their values on this one, after they were sharded or not."""

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint, on the CPU. Raises RuntimeError, or UserError, where they do not fit."""
        self.load_state_dict(weights)

    def save(self, folder: Path) -> str | None:
        """Write the model for others to load, and say how in words; None for a model of flashtrain's own layouts."""
        return None


NEEDED = {
    "loss": "loss(tokens, labels, *, positions=None, mask=None) -> a scalar, the mean cross-entropy in nats",
    "parameter_count": "parameter_count() -> a whole number",
    "flops_per_token": "flops_per_token(context=None) -> a number",
}


def check_contract(model: nn.Module, what: str) -> None:
    """Raise UserError, once and in one line, where a model lacks what a run asks of it. what: the model in words."""
    missing = [
        signature
        for name, signature in NEEDED.items()
        if getattr(type(model), name, None) in (None, getattr(Trainable, name)) and name not in vars(model)
    ]
    if missing:
        raise UserError(f"{what} has no {'; no '.join(missing)}. docs/add-a-model.md has a whole one.")


def as_trainable(model: nn.Module) -> Trainable:
    """The model itself where it is a Trainable; else one around a module whose forward gives logits (B, S, V) of tokens
    (B, S), or that has a loss of its own. UserError: neither."""
    return model if isinstance(model, Trainable) else _Wrapped(model)


def inner(model: Trainable) -> nn.Module:
    """The module that as_trainable was given."""
    return model.module if isinstance(model, _Wrapped) else model


class _Wrapped(Trainable):
    """Any module as a Trainable. Its weights keep their names: state_dict is the module's own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not callable(getattr(module, "loss", None)) and type(module).forward is nn.Module.forward:
            raise UserError(f"{type(module).__name__} has neither forward(tokens) -> logits nor {NEEDED['loss']}.")
        self.module = module
        taken = inspect.signature(module.loss if hasattr(module, "loss") else module.forward).parameters  # type: ignore[arg-type]
        self._any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
        self._taken = frozenset(taken)
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return self.module(tokens, **options)

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        given = {name: one for name, one in (("positions", positions), ("mask", mask)) if one is not None}
        refused = [name for name in given if not self._any and name not in self._taken]
        if refused:
            raise UserError(
                f"{type(self.module).__name__} takes no {' and no '.join(refused)}, which the settings' mask gives: "
                "choose data.document_mask=false and mask=causal, or let it take them."
            )
        own = getattr(self.module, "loss", None)
        if callable(own):
            return own(tokens, labels, **given)
        logits = self.module(tokens, **given)
        logits = getattr(logits, "logits", logits)  # transformers' models return them within an output
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=-100)

    def parameter_count(self) -> int:
        own = getattr(self.module, "parameter_count", None)
        return own() if callable(own) else sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int | None = None) -> float:
        """6 a parameter where the module does not say: without what attention adds."""
        own = getattr(self.module, "flops_per_token", None)
        return own(context) if callable(own) else 6.0 * self.parameter_count()


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}module.")]:
        state[prefix + name[len(prefix) + 7 :]] = state.pop(name)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(f"{prefix}module.")]:
        state[f"{prefix}module.{name[len(prefix) :]}"] = state.pop(name)
