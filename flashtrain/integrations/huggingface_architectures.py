"""Refusal of transformers models whose tokens see each other by anything but the registered attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_context import other_mixers, share_inputs
from flashtrain.integrations.huggingface_layers import body_of

# transformers sets any registered name on any model, which then gets our masks. A model with attention of its own
# (BLOOM, MPT) would read "no mask" where we mean "causal", or select from a table without our name (Falcon, GIT).
# transformers' flags do not identify these models: in 5.23 is_backend_compatible() is wrong for 37 of 189 causal
# classes, and _can_set_attn_implementation() for GIT. So the calls in one forward without weights are counted, which
# serves a model from the release on that uses the registered attention (CodeGen and GPT-J: 5.24).
COUNTED = "counted_attention"

_calls: dict[tuple[type, str], int | None] = {}  # by class and configuration


def refuse_other_architectures(name: str) -> None:
    """Make transformers raise UserError for attn_implementation=name where a model does not use registered attention.

    Models that use it are prepared for sequences sharded over devices (context parallelism).

    Args:
        name: The name under which our attention is registered.
    """
    from transformers import PreTrainedModel

    # transformers has no hook for this, so a method of its PreTrainedModel is wrapped; other names are not affected.
    kind: Any = PreTrainedModel
    if not hasattr(kind.get_correct_attn_implementation, "checks"):
        kind.get_correct_attn_implementation = _checked(kind.get_correct_attn_implementation, name)


def attention_calls(model_class: Any, config: Any) -> int | None:
    """Count how often a model's forward calls the registered attention, by running it on the meta device.

    Args:
        model_class: A model class of transformers.
        config: The model's configuration.

    Returns:
        The number of calls. None where the model has no attention, or where its forward cannot run on the meta device
        and transformers reports that the model accepts a registered attention.
    """
    key = model_class, config.to_json_string()
    if key not in _calls:
        _calls[key] = _counted(model_class, config)
    return _calls[key]


def check_architecture(model: Any, layers: Sequence[nn.Module], path: str) -> None:
    """Raise UserError unless every layer of a decoder mixes tokens only by the registered attention.

    Args:
        model: The decoder.
        layers: The decoder's layers.
        path: Where the model was read from, for the message.
    """
    calls = attention_calls(type(model), model.config)
    if calls is not None and (calls == 0 or calls % len(layers)):
        raise UserError(
            f"{path}: a forward of {type(model).__name__} calls transformers' registered attention {calls} times in "
            f"{len(layers)} layers: expected a model whose every layer is such attention."
        )
    other = other_mixers(body_of(model)[1])
    if other:
        raise UserError(
            f"{path}: {type(model).__name__} mixes tokens by {other}, which does not support packed documents and "
            "context parallelism: expected a model whose every layer is attention."
        )


def _counted(model_class: Any, config: Any) -> int | None:
    from transformers import AttentionInterface, AttentionMaskInterface

    calls = 0

    def count(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        nonlocal calls
        calls += 1
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def nothing_hidden(batch_size: int, q_length: int, kv_length: int, **_: Any) -> Tensor:
        return torch.zeros(batch_size, 1, q_length, kv_length)

    AttentionInterface.register(COUNTED, count)
    AttentionMaskInterface.register(COUNTED, nothing_hidden)
    names = {"attn_implementation": COUNTED, "experts_implementation": "batched_mm"}  # the others read values
    try:
        with torch.device("meta"), torch.no_grad():
            model = model_class._from_config(deepcopy(config), **names).eval()
            model.config.pad_token_id = None  # otherwise the model searches the tokens for padding
            tokens = torch.zeros(1, 4, dtype=torch.int64)
            given = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
            model(input_ids=tokens, use_cache=False, **given)
    except KeyError as error:
        return 0 if error.args == (COUNTED,) else None  # its own table has no such name
    except Exception:  # noqa: BLE001 - whatever failed, the count stays unknown (XLNet, Longformer, T5)
        return None if calls or model_class._can_set_attn_implementation() else 0
    return calls if calls or any("Attention" in type(one).__name__ for one in model.modules()) else None


def _checked(original: Callable[..., str], checked: str) -> Callable[..., str]:
    from transformers import PreTrainedModel

    @wraps(original)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *rest: Any, **named: Any) -> str:
        if requested_attention == checked:
            if attention_calls(type(self), self.config) == 0:
                raise UserError(
                    f"{type(self).__name__} calls transformers' registered attention 0 times in a forward, so that "
                    f"its results with {requested_attention!r} would be wrong. Use attn_implementation='eager' or "
                    "another architecture."
                )
            for model in self.modules():
                if isinstance(model, PreTrainedModel):
                    share_inputs(model)
        return original(self, requested_attention, *rest, **named)

    get_correct_attn_implementation.checks = checked  # type: ignore[attr-defined]
    return get_correct_attn_implementation
