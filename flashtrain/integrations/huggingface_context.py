"""Hooks that make a transformers model correct on one device's shard of a sequence
(context parallelism).

Without them a model would count positions from 0, search packed documents and the largest position
(dynamic rotary scaling) among this device's tokens alone, and shift labels within these. Whole
sequences are not affected by them. Shapes: B batch, S sequence, n tokens of it on this device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_document_search import (
    are_counted,
    begin_forward,
    end_forward,
    found_once,
)
from flashtrain.integrations.huggingface_mixers import RUNNING
from flashtrain.integrations.huggingface_specs import states_of
from flashtrain.models.sharded_sequence import ShardedSequence, sharded_sequence

COUNT_FROM_0 = ("gpt2", "gpt_bigcode", "ctrl", "distilbert")  # and all models with rotary positions
SHIFTING = ("ForCausalLM", "ForConditionalGeneration")
BY_TOKEN = ("ForMaskedLM", "ForTokenClassification")  # losses that shift nothing


class Inputs(NamedTuple):
    """Positions and padding of the whole sequence, from a model's latest call."""

    positions: Tensor | None  # (B or 1, S); None: 0, 1, ...
    padding: Tensor | None  # (B, S), 0 for padded keys; None: not passed


_INPUTS: WeakKeyDictionary[Any, Inputs] = WeakKeyDictionary()
# The whole tensors (B, S) by shards (B, n), so that each is gathered once; None
# for positions 0, 1, ...
_WHOLE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_CHECKED: WeakSet[nn.Module] = WeakSet()


def inputs_of(sequence: ShardedSequence) -> Inputs | None:
    """Return the whole sequence's positions and padding in a model's latest call; None
    if no model was called."""
    return _INPUTS.get(sequence)


def whole_of(sequence: ShardedSequence, part: Tensor) -> Tensor | None:
    """Return the whole tensor (B, S) of which `part` (B, n) is this device's shard, gathered from
    all devices by the first call and cached. None if `part` is the positions that the hooks add (0,
    1, ... in the whole sequence)."""
    known = _WHOLE.setdefault(sequence, WeakTensorKeyDictionary())
    if part not in known:
        known[part] = sequence.gathered(part)
    return known[part]


def share_inputs(model: nn.Module) -> None:
    """Add hooks to a model that give its forward the positions and padding of a sharded
    sequence, and check inputs."""
    if _share not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_share, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


def share_sequences() -> None:
    """Replace transformers' label shift and document search, so that both regard whole
    sequences, not shards."""
    from transformers import masking_utils
    from transformers.loss import loss_utils

    functions: Any = masking_utils
    if not hasattr(functions.find_packed_sequence_indices, "of_whole"):
        functions.find_packed_sequence_indices = _finds_in_whole(
            functions.find_packed_sequence_indices
        )
    losses: dict[str, Any] = loss_utils.LOSS_MAPPING
    for name in SHIFTING:
        if not hasattr(losses[name], "of_whole"):
            losses[name] = _of_whole(losses[name])


def _share(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    sequence = sharded_sequence()
    if not torch.compiler.is_compiling():
        given = len(args) > 1 or any(
            x is not None and not are_counted(x)
            for name, x in kwargs.items()
            if "position_ids" in name
        )
        # A user's own forward may make positions of packed documents.
        theirs = "forward" not in vars(model) and type(model).forward.__module__.startswith(
            "transformers."
        )
        counts = not given and sequence is None and theirs
        begin_forward(model, counts, _by_name(model, args, kwargs))
    return None if sequence is None else _shared(sequence, model, args, kwargs)


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        end_forward(model)


def _by_name(model: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    names = inspect.signature(model.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


@torch.compiler.disable
def _shared(
    sequence: ShardedSequence, model: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Return (no arguments, all arguments of a model's forward as keywords), with this device's
    positions added; None, for no change, if its tokens are not this device's shard."""
    names, given = inspect.signature(model.forward).parameters, _by_name(model, args, kwargs)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    # A model of other tokens computes on these alone: an encoder of images, a reward
    # model of its own text.
    if (
        "position_ids" not in names
        or not isinstance(tokens, Tensor)
        or tokens.shape[1] != sequence.held
    ):
        return None
    _check(model, sequence, given)
    known = _WHOLE.setdefault(sequence, WeakTensorKeyDictionary())
    positions = _part_and_whole(sequence, given.get("position_ids"), "position_ids")
    if positions is None:
        _check_counting(model)
        positions = sequence.positions(sequence.held, tokens.device), None
        known[positions[0]] = None
    padding = _part_and_whole(sequence, given.get("attention_mask"), "attention_mask")
    given["position_ids"] = positions[0]
    if padding is not None:
        given["attention_mask"] = padding[0]
    _INPUTS[sequence] = Inputs(positions[1], None if padding is None else padding[1])
    return (), given


def _part_and_whole(
    sequence: ShardedSequence, given: Any, name: str
) -> tuple[Tensor, Tensor | None] | None:
    """Return (this device's shard, the whole tensor) of a forward's argument, given as either;
    None if it is None."""
    if given is None:
        return None
    if (
        not isinstance(given, Tensor)
        or given.dim() != 2
        or given.shape[1] not in (sequence.held, sequence.length)
    ):
        what = (
            f"of the shape {tuple(given.shape)}"
            if isinstance(given, Tensor)
            else f"of type {type(given).__name__}"
        )
        raise UserError(
            f"{name} {what} under context parallelism: "
            "expected None, or a tensor (B, S) sharded as the tokens are."
        )
    if given.shape[1] == sequence.held:
        return given, whole_of(sequence, given)
    # (1, S), which the strategy does not shard in a batch of several rows.
    part = sequence.shard(given)
    _WHOLE[sequence][part] = given
    return part, given


def _check(model: nn.Module, sequence: ShardedSequence, given: dict[str, Any]) -> None:
    """Raise UserError for inputs that a shard of a sequence does not support."""
    if model not in _CHECKED:
        if RUNNING.get() is None and (states := states_of(type(model), model.config)):
            raise UserError(
                f"{type(model).__name__} mixes tokens by {states}, which is not supported "
                "under context parallelism. Use a model of attention layers, a hybrid within "
                "HuggingFaceDecoder, or another strategy (fsdp, ddp)."
            )
        for module in model.modules():
            if (
                scales_with_length(module)
                and _add_longest not in module._forward_pre_hooks.values()
            ):
                module.register_forward_pre_hook(_add_longest, with_kwargs=True)
                module.register_forward_hook(_drop_longest)
        _CHECKED.add(model)
    past = given.get("past_key_values", given.get("cache"))  # its name since transformers 5.24
    if past is not None and past.get_seq_length() > 0:
        raise UserError(
            "past_key_values with tokens under context parallelism: "
            "expected an empty cache or None."
        )
    if given.get("labels") is not None:
        _check_loss(model)
    scale = getattr(model.config, "floor_scale", None)
    if (
        getattr(model.config, "attn_temperature_tuning", False)
        and scale is not None
        and sequence.length >= scale
    ):
        raise UserError(
            f"{type(model).__name__} scales its queries by positions, which it would count on each "
            "device separately under context parallelism. Set attn_temperature_tuning=False in its "
            f"configuration, or use fewer than {scale} tokens."
        )


def _check_counting(model: Any) -> None:
    """Raise UserError for a model that may count positions from the end of padding or from an
    offset, not from 0."""
    config = model.config.get_text_config()
    if getattr(config, "rope_parameters", None) is None and config.model_type not in COUNT_FROM_0:
        raise UserError(
            f"{type(model).__name__} may not count positions from 0, which is needed under context "
            "parallelism. Put position_ids (B, S) into the batch and pass them to the model."
        )


def scales_with_length(module: nn.Module) -> bool:
    """Return whether a module's rotary embeddings depend on the largest position in the batch."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def _add_longest(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Append the whole sequence's largest position to the arguments of rotary embeddings
    (x, position_ids, ...)."""
    sequence = sharded_sequence()
    if sequence is None:
        return None
    by_name = "position_ids" in kwargs
    part: Tensor = kwargs["position_ids"] if by_name else args[1]
    whole = whole_of(sequence, part)
    last = part.new_tensor(sequence.length - 1) if whole is None else whole.max()
    longer = torch.cat((part, last.to(part).expand(part.shape[0], 1)), 1)
    if by_name:
        return args, {**kwargs, "position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def _drop_longest(module: nn.Module, args: tuple, output: Any) -> Any:
    return None if sharded_sequence() is None else tree_map(lambda x: x[:, :-1], output)


def _finds_in_whole(find: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Return `find`, transformers' search for documents in positions, changed so that for a shard
    it reports documents if the whole sequence has any."""

    @wraps(find)
    def in_whole(position_ids: Tensor) -> Tensor | None:
        sequence = sharded_sequence()
        inputs = None if sequence is None else inputs_of(sequence)
        if sequence is None or inputs is None or position_ids.shape[1] != sequence.held:
            return found_once(position_ids, find)
        packed = inputs.positions is not None and find(inputs.positions) is not None
        return torch.zeros_like(position_ids) if packed else None

    in_whole.of_whole = find  # type: ignore[attr-defined]
    return in_whole


def _of_whole(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss of transformers, changed so that it shifts labels within the whole sequence."""
    names = list(inspect.signature(loss).parameters)

    @wraps(loss)
    def of_whole(*args: Any, **kwargs: Any) -> Tensor:
        sequence = sharded_sequence()
        if sequence is None:
            return loss(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("num_items_in_batch") is not None:
            raise UserError(
                "num_items_in_batch under context parallelism: expected None, since the strategy "
                "weights the loss itself, by each device's number of labels."
            )
        if given.get("shift_labels") is None:
            given["shift_labels"] = sequence.next_labels(given["labels"])
        return loss(**given)

    of_whole.of_whole = True  # type: ignore[attr-defined]
    return of_whole


def _check_loss(model: Any) -> None:
    """Raise UserError for a model whose loss shifts or pools on each device alone."""
    forward: Any = inspect.unwrap(type(model).forward)
    of_whole = (
        hasattr(model.loss_function, "of_whole") and "loss_function" in forward.__code__.co_names
    )
    if not of_whole and getattr(model, "loss_type", None) not in BY_TOKEN:
        raise UserError(
            f"{type(model).__name__} computes its loss itself, which is not supported under "
            "context parallelism. Pass no labels; compute the loss from its logits, with labels "
            "shifted before the strategy sharded the batch."
        )
