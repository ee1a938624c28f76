"""transformers' models under context parallelism, called as on one device.

A model receives this device's tokens (sharded_sequence.py). By itself it would count positions from 0, search packed
documents and the largest position (dynamic rotary scaling) among these tokens alone, and shift labels within them. A
hook before the forward of every model that is built for our attention, one around such rotary embeddings, and a loss
function correct this. Without a sharded sequence they do nothing.

Shapes: B batch, S sequence, n tokens of it on this device.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from flashtrain.errors import UserError
from flashtrain.models.sharded_sequence import ShardedSequence, sharded_sequence

UNDER = "under context parallelism"
# Layers whose tokens see each other by attention alone.
ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
COUNT_FROM_0 = ("gpt2", "gpt_bigcode", "ctrl", "distilbert")  # and all models with rotary positions
SHIFTING = ("ForCausalLM", "ForConditionalGeneration")
BY_TOKEN = ("ForMaskedLM", "ForTokenClassification")  # losses that shift nothing


class _Forward:
    """A running forward of a model. counts: whether the model makes its positions 0, 1, 2, ... itself. seen: positions
    that were searched for documents, which synchronizes the device, with the results."""

    def __init__(self, model: nn.Module, counts: bool) -> None:
        self.model, self.counts = model, counts
        self.seen: list[tuple[Tensor, Tensor | None]] = []


class _Running(threading.local):
    """This thread's running forwards, the innermost last. Recomputation in a backward is in none."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_running = _Running()


class Inputs(NamedTuple):
    """The latest inputs of a model, of the whole sequence. positions: (B or 1, S) (None: 0, 1, ...). padding: (B, S), 0
    for padded keys (None: not passed)."""

    positions: Tensor | None
    padding: Tensor | None


_INPUTS: WeakKeyDictionary[Any, Inputs] = WeakKeyDictionary()
# The whole tensors (B, S) by shards (B, n), so that each is gathered once; None for positions 0, 1, ...
_WHOLE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_CHECKED: WeakSet[nn.Module] = WeakSet()


def inputs_of(spread: ShardedSequence) -> Inputs | None:
    """The latest model's inputs; None where no model was called since the batch was sharded."""
    return _INPUTS.get(spread)


def whole_of(spread: ShardedSequence, part: Tensor) -> Tensor | None:
    """All devices' parts (B, n) as (B, S); None for positions 0, 1, ..."""
    known = _WHOLE.setdefault(spread, WeakTensorKeyDictionary())
    if part not in known:
        known[part] = spread.gathered(part)
    return known[part]


def share_inputs(model: nn.Module) -> None:
    """Let a transformers model compute with this device's shard of a sequence as with the whole."""
    if _share not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_share, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


def share_sequences() -> None:
    """Make transformers shift labels and search documents in whole sequences."""
    from transformers import masking_utils
    from transformers.loss import loss_utils

    functions: Any = masking_utils
    if not hasattr(functions.find_packed_sequence_indices, "of_whole"):
        functions.find_packed_sequence_indices = _finds_in_whole(functions.find_packed_sequence_indices)
    losses: dict[str, Any] = loss_utils.LOSS_MAPPING
    for name in SHIFTING:
        if not hasattr(losses[name], "of_whole"):
            losses[name] = _of_whole(losses[name])


def _share(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    spread = sharded_sequence()
    if not torch.compiler.is_compiling():
        given = len(args) > 1 or any(x is not None for name, x in kwargs.items() if "position_ids" in name)
        # A user's own forward may make positions of packed documents.
        theirs = "forward" not in vars(model) and type(model).forward.__module__.startswith("transformers.")
        counts = not given and spread is None and theirs
        _running.forwards.append(_Forward(model, counts))
    return None if spread is None else _shared(spread, model, args, kwargs)


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    forwards = [] if torch.compiler.is_compiling() else _running.forwards
    if forwards and forwards[-1].model is model:  # a hook before ours may have failed
        forwards.pop()


@torch.compiler.disable
def _shared(
    spread: ShardedSequence, model: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """The arguments of a model's forward as keywords, with this device's positions added."""
    names = list(inspect.signature(model.forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    # A model of other tokens computes on these alone: an encoder of images, a reward model of its own text.
    if "position_ids" not in names or not isinstance(tokens, Tensor) or tokens.shape[1] != spread.held:
        return None
    _check(model, spread, given)
    known = _WHOLE.setdefault(spread, WeakTensorKeyDictionary())
    positions = _part_and_whole(spread, given.get("position_ids"), "position_ids", tokens)
    if positions is None:
        _check_counting(model)
        positions = spread.positions(spread.held, tokens.device), None
        known[positions[0]] = None
    padding = _part_and_whole(spread, given.get("attention_mask"), "attention_mask", tokens)
    given["position_ids"] = positions[0]
    if padding is not None:
        given["attention_mask"] = padding[0]
    _INPUTS[spread] = Inputs(positions[1], None if padding is None else padding[1])
    return (), given


def _part_and_whole(
    spread: ShardedSequence, given: Any, name: str, tokens: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """This device's shard of an argument, and the whole; None where the argument is None."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.dim() != 2 or given.shape[1] not in (spread.held, spread.length):
        what = f"of the shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"of type {type(given).__name__}"
        raise UserError(
            f"{name} {what} {UNDER}: expected a tensor (B, S) of the batch, sharded as its tokens are, or none."
        )
    if given.shape[1] == spread.held:
        return given, whole_of(spread, given)
    part = spread.shard(given)  # (1, S), which the strategy does not shard in a batch of several rows
    _WHOLE[spread][part] = given
    return part, given


def _check(model: nn.Module, spread: ShardedSequence, given: dict[str, Any]) -> None:
    """Raise UserError for inputs that a shard of a sequence does not support."""
    if model not in _CHECKED:
        _check_layers(model)
        for module in model.modules():
            if _scales_with_length(module) and _add_longest not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_add_longest, with_kwargs=True)
                module.register_forward_hook(_drop_longest)
        _CHECKED.add(model)
    past = given.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise UserError(f"past_key_values with tokens {UNDER}: expected none. Pass the whole sequence at once.")
    if given.get("labels") is not None:
        _check_loss(model)
    scale = getattr(model.config, "floor_scale", None)
    if getattr(model.config, "attn_temperature_tuning", False) and scale is not None and spread.length >= scale:
        raise UserError(
            f"{type(model).__name__} scales its queries by positions that it counts on each device itself {UNDER}. "
            f"Set attn_temperature_tuning=False in its configuration, or use less than {scale} tokens."
        )


def _check_layers(model: nn.Module) -> None:
    """Raise UserError for a model that mixes tokens by anything but attention."""
    from transformers import PreTrainedModel

    config: Any = model.config
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    other = ", ".join(sorted(map(str, kinds - ATTENDING)))
    innermost = not any(isinstance(module, PreTrainedModel) and module is not model for module in model.modules())
    convolves = innermost and any(isinstance(module, nn.Conv1d) for module in model.modules())
    if other or convolves or getattr(model, "_is_stateful", False):
        raise UserError(
            f"{type(model).__name__} mixes tokens by {other or 'states or convolutions'}, which is not supported "
            f"{UNDER}. Use a model of attention layers, or another strategy (fsdp, ddp)."
        )


# --- positions --------------------------------------------------------------------------------------------------------


def _check_counting(model: Any) -> None:
    """Raise UserError for a model that may not count positions from 0, but from padding or an offset."""
    config = model.config.get_text_config()
    if getattr(config, "rope_parameters", None) is None and config.model_type not in COUNT_FROM_0:
        raise UserError(
            f"{type(model).__name__} may not count positions from 0, which is needed {UNDER}. Put position_ids (B, S) "
            "into the batch and pass them to the model."
        )


def _scales_with_length(module: nn.Module) -> bool:
    """Whether rotary embeddings depend on the largest position."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _add_longest(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Append the whole sequence's largest position to the arguments of rotary embeddings (x, position_ids, ...)."""
    spread = sharded_sequence()
    if spread is None:
        return None
    by_name = "position_ids" in kwargs
    part: Tensor = kwargs["position_ids"] if by_name else args[1]
    whole = whole_of(spread, part)
    last = part.new_tensor(spread.length - 1) if whole is None else whole.max()
    longer = torch.cat((part, last.to(part).expand(part.shape[0], 1)), 1)
    if by_name:
        return args, {**kwargs, "position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def _drop_longest(module: nn.Module, args: tuple, output: Any) -> Any:
    return None if sharded_sequence() is None else tree_map(lambda x: x[:, :-1], output)


# --- documents --------------------------------------------------------------------------------------------------------


def documents_of(positions: Tensor) -> Tensor | None:
    """(B, S) ids of the documents that transformers finds in positions (B, S); None where each row is one."""
    from transformers.masking_utils import find_packed_sequence_indices as found

    whole: Any = getattr(found, "of_whole", found)
    return whole(positions)


def holds_no_documents(positions: Tensor) -> bool:
    """Whether positions (B or 1, S) are known to be of one document per row without reading them. Meta tensors count as
    such."""
    if positions.is_meta:
        return True
    forwards = _running.forwards
    if not forwards:
        return False
    return forwards[-1].counts or any(found is None and _is_same(x, positions) for x, found in forwards[-1].seen)


def _found_once(positions: Tensor, find: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """`find`'s result for positions (B, S), computed once per forward, since it synchronizes; None for meta tensors."""
    if positions.is_meta:
        return None
    forwards = _running.forwards
    if not forwards or torch.compiler.is_compiling():
        return find(positions)
    if forwards[-1].counts:
        return None
    for x, found in forwards[-1].seen:
        if _is_same(x, positions):
            return found
    forwards[-1].seen.append((positions, found := find(positions)))
    return found


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Whether positions (B or 1, S) share memory; a row may be expanded to a batch. x must be alive."""
    repeated = all(each.shape[0] == 1 or each.stride(0) == 0 for each in (x, y))
    rows = repeated or (x.shape[0] == y.shape[0] and x.stride(0) == y.stride(0))
    return rows and x.data_ptr() == y.data_ptr() and x.shape[1] == y.shape[1] and x.stride(1) == y.stride(1)


def _finds_in_whole(find: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """transformers' search for documents, which for a shard looks whether the whole sequence has any. transformers
    skips it where there is a cache or a padding mask."""

    @wraps(find)
    def in_whole(position_ids: Tensor) -> Tensor | None:
        spread = sharded_sequence()
        inputs = None if spread is None else inputs_of(spread)
        if spread is None or inputs is None or position_ids.shape[1] != spread.held:
            return _found_once(position_ids, find)
        packed = inputs.positions is not None and find(inputs.positions) is not None
        return torch.zeros_like(position_ids) if packed else None

    in_whole.of_whole = find  # type: ignore[attr-defined]
    return in_whole


# --- losses -----------------------------------------------------------------------------------------------------------


def _of_whole(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of transformers that shifts labels within the whole sequence."""
    names = list(inspect.signature(loss).parameters)

    @wraps(loss)
    def of_whole(*args: Any, **kwargs: Any) -> Tensor:
        spread = sharded_sequence()
        if spread is None:
            return loss(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("num_items_in_batch") is not None:
            raise UserError(
                f"num_items_in_batch {UNDER}: expected none, since the strategy weights a step's loss as the mean "
                "over this device's labels."
            )
        if given.get("shift_labels") is None:
            given["shift_labels"] = spread.next_labels(given["labels"])
        return loss(**given)

    of_whole.of_whole = True  # type: ignore[attr-defined]
    return of_whole


def _check_loss(model: Any) -> None:
    """Raise UserError for a model whose loss shifts or pools on each device alone."""
    forward: Any = inspect.unwrap(type(model).forward)
    of_whole = hasattr(model.loss_function, "of_whole") and "loss_function" in forward.__code__.co_names
    if not of_whole and getattr(model, "loss_type", None) not in BY_TOKEN:
        raise UserError(
            f"{type(model).__name__} computes its loss itself, which is not supported {UNDER}. Pass no labels; compute "
            "the loss from its logits, with labels that were shifted before the strategy sharded the batch."
        )
