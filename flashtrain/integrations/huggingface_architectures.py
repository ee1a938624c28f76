"""Which transformers models take their attention from its AttentionInterface, and the refusal of those that do not.

transformers sets any registered name on any model, and its masks come from us then; a model with attention of its own
(BLOOM, MPT, CodeGen) would read "no mask" where we mean "causal", or choose from a table without our name (Falcon,
GPT-J, GIT). As its own set_attn_implementation does, the models' source is read. Its flags do not tell: in transformers
5.23 is_backend_compatible() differs on 37 of 189 causal classes, and _can_set_attn_implementation() on GIT.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_context import share_inputs, source_of

INTERFACE = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b|\bAttentionInterface\b")
OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\((?:torch\.)?(?:nn\.)?Module\):", re.MULTILINE)
OWN_TABLE = re.compile(r"_ATTENTION_CLASSES\[[\w.]*attn_implementation\]")

_names: set[str] = set()


def refuse_other_architectures(name: str) -> None:
    """From now on a transformers model that does not ask the interface is refused, in a UserError, when it is built or
    set to run on the attention of this name; one that does is made ready for sequences that devices share.

    transformers asks nobody when it builds one: two methods of its PreTrainedModel are wrapped, once, and do what they
    did for every other name.
    """
    from transformers import PreTrainedModel

    if not _names:
        kind: Any = PreTrainedModel
        kind.get_correct_attn_implementation = _built(kind.get_correct_attn_implementation)
        kind.set_attn_implementation = _set(kind.set_attn_implementation)
    _names.add(name)


@cache
def own_attention(model_class: type) -> str | None:
    """Why a class of transformers models does not run on a registered attention; None where it does, or has none.

    The source of the modules that define it and its ancestors is read; where there is no source, nothing is known.
    """
    from transformers import PreTrainedModel

    sources = {}
    for ancestor in model_class.__mro__:
        if issubclass(ancestor, PreTrainedModel) and ancestor is not PreTrainedModel:
            sources[ancestor.__module__] = source_of(ancestor.__module__)
    text = "\n".join(sources.values())
    if OWN_TABLE.search(text):
        return "chooses its attention from a table of its own"
    if INTERFACE.search(text) or not OWN_ATTENTION.search(text):
        return None
    # A reward model around a Llama, with an attention of its own on top: the Llama is judged when it is built.
    return None if any(_holds_models(module) for module in sources) else "computes its attention itself"


def _holds_models(module: str) -> bool:
    """Whether a module outside transformers imports whole models of other modules."""
    from transformers import PreTrainedModel

    if module.partition(".")[0] in ("transformers", "transformers_modules"):
        return False
    return any(
        isinstance(value, type)
        and value is not PreTrainedModel
        and value.__module__ != module
        and (issubclass(value, PreTrainedModel) or value.__name__.startswith("AutoModel"))
        for value in vars(sys.modules[module]).values()
    )


def _check(model_class: type, name: str) -> None:
    reason = own_attention(model_class)
    if reason is not None:
        other = "'sdpa' or 'eager'" if getattr(model_class, "_supports_sdpa", False) else "'eager'"
        raise UserError(
            f"{model_class.__name__} {reason} and does not ask transformers for {name!r}: its results would be wrong. "
            f"Possible: attn_implementation={other} for this model, or another architecture."
        )


def _built(original: Callable[..., str]) -> Callable[..., str]:
    @wraps(original)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *rest: Any, **named: Any) -> str:
        if requested_attention in _names:
            _check(type(self), str(requested_attention))
            share_inputs(self)
        return original(self, requested_attention, *rest, **named)

    return get_correct_attn_implementation


def _set(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def set_attn_implementation(self: Any, attn_implementation: Any, *rest: Any, **named: Any) -> Any:
        for model, name in _asked(self, attn_implementation):
            if name in _names:
                _check(type(model), name)
                share_inputs(model)
        return original(self, attn_implementation, *rest, **named)

    return set_attn_implementation


def _asked(model: nn.Module, attn_implementation: Any) -> list[tuple[nn.Module, str]]:
    """Each transformers model within `model` and the name that is asked for it; in a dictionary names stand by the
    entry of the configuration, "" for the whole model's."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if isinstance(attn_implementation, str):
        return [(one, attn_implementation) for one in models]
    if not isinstance(attn_implementation, dict):
        return []
    whole: Any = model.config
    parts = {key: getattr(whole, key, None) if key else whole for key in attn_implementation}
    found = [(one, attn_implementation[key]) for one in models for key, part in parts.items() if one.config is part]
    return [(one, name) for one, name in found if isinstance(name, str)]
