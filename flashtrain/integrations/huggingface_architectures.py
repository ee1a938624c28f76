"""Refusal of transformers models in which tokens see each other by other ways than the attention
that flashtrain registers with transformers and the mixers of huggingface_mixers.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, first_line
from flashtrain.integrations.huggingface_context import share_inputs
from flashtrain.integrations.huggingface_layers import body_of
from flashtrain.integrations.huggingface_masks import AttentionMask
from flashtrain.integrations.huggingface_mixers import served
from flashtrain_kernels.arguments import MAX_HEAD_DIM

# transformers sets any registered name on any model, which then gets our masks. A model with
# attention of its own (BLOOM, MPT) would read "no mask" where we mean "causal", or select from a
# table without our name (Falcon, GIT). transformers' flags do not identify these models: in 5.23
# is_backend_compatible() is wrong for 37 of 189 causal classes, and _can_set_attn_implementation()
# for GIT. So the calls in one forward without weights are counted, which serves a model from the
# release on that uses the registered attention (CodeGen and GPT-J: 5.24).
COUNTED = "counted_attention"
UNSERVED = (
    ", which flashtrain's attention does not support. Use attention=standard, or another model"
)

_calls: dict[tuple[type, str], tuple[int | None, str | None]] = {}  # by class and configuration


def refuse_other_architectures(name: str) -> None:
    """Make transformers raise UserError when attn_implementation=name is set on a model that
    computes attention by its own code and never calls the registered function.

    A model that does call it gets the hooks that context parallelism needs.

    Args:
        name: The name under which our attention is registered.
    """
    from transformers import PreTrainedModel

    # transformers has no hook for this, so a method of its PreTrainedModel is wrapped; other
    # names are not affected.
    kind: Any = PreTrainedModel
    if not hasattr(kind.get_correct_attn_implementation, "checks"):
        kind.get_correct_attn_implementation = _checked(kind.get_correct_attn_implementation, name)


def attention_calls(model_class: Any, config: Any) -> tuple[int | None, str | None]:
    """Count how often a model's forward calls the registered attention, by running
    it on the meta device.

    Args:
        model_class: A model class of transformers.
        config: The model's configuration.

    Returns:
        The number of calls, and why our attention cannot compute them (None: it can). The number is
        None where the model has no attention, or where its forward cannot run on the meta device
        and transformers reports that the model accepts a registered attention.
    """
    key = model_class, config.to_json_string()
    if key not in _calls:
        _calls[key] = _counted(model_class, config)
    return _calls[key]


def check_architecture(
    model: Any, layers: Sequence[nn.Module], path: str, *, ours: bool = True
) -> None:
    """Raise UserError unless the model is causal, and every layer mixes tokens by the registered
    attention, or the model is a hybrid that huggingface_mixers.py serves.

    Args:
        model: The decoder.
        layers: The decoder's layers.
        path: Where the model was read from, for the message.
        ours: Whether the registered attention is ours, not one of transformers.
    """
    calls, unserved = attention_calls(type(model), model.config)
    hybrid = served(type(model))
    if calls is not None and not hybrid and (calls == 0 or calls % len(layers)):
        raise UserError(
            f"{path}: a forward of {type(model).__name__} calls transformers' registered "
            f"attention {calls} times in {len(layers)} layers: expected a model whose every "
            "layer is such attention."
        )
    if not hybrid and "position_ids" not in inspect.signature(body_of(model)[1].forward).parameters:
        ours = True
        unserved = "takes no position_ids, so that packed documents would be read as one"
    if unserved is not None and (ours or calls is None):
        raise UserError(f"{path}: {type(model).__name__} {unserved}.")
    if not all(getattr(one, "is_causal", True) for one in model.modules()):
        decodes = hasattr(model.config, "is_decoder")  # BERT's
        entry = " Set +model.options={is_decoder: true}." if decodes else ""
        if getattr(model.config, "use_bidirectional_attention", None):  # Gemma
            entry = " Set +model.options={use_bidirectional_attention: null}."
        raise UserError(
            f"{path}: tokens of {type(model).__name__} see the later ones that they predict: "
            f"expected a decoder.{entry}"
        )


def _counted(
    model_class: Any, config: Any, mask: Callable[..., Any] = AttentionMask
) -> tuple[int | None, str | None]:
    """Count the calls anew, as attention_calls describes. mask(rows, queries, keys): makes the mask
    that the layers get; by default one of our type."""
    from transformers import AttentionInterface, AttentionMaskInterface

    calls = width = wider = 0

    def count(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        nonlocal calls, width, wider
        calls, width = calls + 1, max(width, query.shape[3])
        wider = max(wider, value.shape[3] - query.shape[3])
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def nothing_hidden(batch_size: int, q_length: int, kv_length: int, **_: Any) -> Any:
        return mask(batch_size, q_length, kv_length)

    AttentionInterface.register(COUNTED, count)
    AttentionMaskInterface.register(COUNTED, nothing_hidden)
    # The others read values.
    names = {"attn_implementation": COUNTED, "experts_implementation": "batched_mm"}
    try:
        with torch.device("meta"), torch.no_grad():
            model = model_class._from_config(deepcopy(config), **names).eval()
            # Otherwise the model searches the tokens for padding.
            vars(model.config)["pad_token_id"] = None
            tokens = torch.zeros(1, 4, dtype=torch.int64)
            given = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
            model(input_ids=tokens, use_cache=False, **given)
    except KeyError as error:
        return 0 if error.args == (COUNTED,) else None, None  # its own table has no such name
    except Exception as error:  # noqa: BLE001 - whatever failed, the count stays unknown (XLNet, Longformer, T5)
        if mask is AttentionMask:
            found, failure = _counted(
                model_class, config, lambda batch, *sizes: torch.zeros(batch, 1, *sizes)
            )
            if found is not None:
                failure = f"computes with its attention masks{UNSERVED}"
            return found, failure
        # The device meta has no values to read, of which torch says so; other errors
        # come on every device.
        fails = not isinstance(error, NotImplementedError | RuntimeError)
        unserved = f"fails in a forward: {first_line(error)}" if fails else None
        return None if calls or model_class._can_set_attn_implementation() else 0, unserved
    unserved = None
    if width > MAX_HEAD_DIM:
        unserved = f"has heads of {width}, and not {MAX_HEAD_DIM} or fewer{UNSERVED}"
    elif wider > 0:
        unserved = f"has values wider than its queries{UNSERVED}"
    has_attention = calls or any("Attention" in type(one).__name__ for one in model.modules())
    return calls if has_attention else None, unserved


def _checked(original: Callable[..., str], checked: str) -> Callable[..., str]:
    from transformers import PreTrainedModel

    @wraps(original)
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, *rest: Any, **named: Any
    ) -> str:
        if requested_attention == checked:
            if attention_calls(type(self), self.config)[0] == 0:
                raise UserError(
                    f"{type(self).__name__} calls transformers' registered attention 0 times in a "
                    f"forward, so that its results with {requested_attention!r} would be wrong. "
                    "Use attn_implementation='eager' or another architecture."
                )
            for model in self.modules():
                if isinstance(model, PreTrainedModel):
                    share_inputs(model)
        return original(self, requested_attention, *rest, **named)

    get_correct_attn_implementation.checks = checked  # type: ignore[attr-defined]
    return get_correct_attn_implementation
