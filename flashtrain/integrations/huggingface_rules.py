"""What of transformers our attention can serve: its architectures, and the rules of its masks.

Which transformers models take their attention from its AttentionInterface, and the refusal of those that do not.

transformers sets any registered name on any model, and its masks come from us then; a model with attention of its own
(BLOOM, MPT, CodeGen) would read "no mask" where we mean "causal", or choose from a table without our name (Falcon,
GPT-J, GIT). It keeps no reliable flag of this: as its own set_attn_implementation does, the models' source is read.

What a transformers mask function says, read as rules on positions instead of evaluated for every pair.

transformers (5.x, masking_utils) describes a mask as a function of (batch, head, query, key) composed from a handful of
parts. Evaluating it is an S x S matrix; reading which parts it is made of gives, for each query, one interval of keys.
What is not made of these parts only (a caller's own overlay, blocks of image tokens) is not read, and stays dense.

B batch, S sequence (Sq queries, Sk keys).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_context import share_inputs, source_of
from flashtrain_kernels.masks import documents_from_ids

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


_MODULE = "transformers.masking_utils"
# Powers of two that add up to more keys than one mask can have under torch.compile (2^21 to each side of the query).
_STEPS = tuple(2**power for power in range(20, -1, -1))


class Rules(NamedTuple):
    """All of these hold for a visible pair, in absolute positions.

    left, right: key >= query - left, key <= query + right; None: no bound.
    chunk: query and key are in the same chunk of this many tokens; None: no chunks. chunk_start: (B,) where a row's
    first chunk begins.
    documents: (B, S) ids, query and key are of the same document, with positions (B, S) that count within it.
    """

    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    chunk_start: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None


def read(mask_function: Callable[..., Any]) -> Rules | None:
    """The rules that a mask function of transformers is made of; None when it has a part that is not known here."""
    if getattr(mask_function, "__module__", None) != _MODULE:
        return None
    part = mask_function.__qualname__.removesuffix(".<locals>.inner_mask").removesuffix(".<locals>.and_mask")
    held = _held(mask_function)
    if part == "and_masks":
        parts = [read(function) for function in held["mask_functions"]]
        known = [rules for rules in parts if rules is not None]
        return _all_of(known) if len(known) == len(parts) else None
    if part == "causal_mask_function":
        return Rules(right=0)
    if part == "bidirectional_mask_function":
        return Rules()
    if part == "sliding_window_overlay":
        return Rules(left=held["sliding_window"] - 1)
    if part == "sliding_window_bidirectional_overlay":
        return Rules(left=held["sliding_window"], right=held["sliding_window"])
    if part == "chunked_overlay":
        return Rules(chunk=held["chunk_size"], chunk_start=held["left_padding"])
    if part == "packed_sequence_mask_function":
        return Rules(documents=held["packed_sequence_mask"])
    if part == "remap_positions_for_packed_sequence":
        # Within a document positions rise by one a token, so bounds on their difference are bounds on indices.
        inner = read(held["mask_function"])
        return None if inner is None else inner._replace(positions=held["position_ids"])
    return None


def intervals(rules: Rules, query: Tensor, first_key: int, keys: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """LOW and HIGH of each query, and the START of its document, each (B, Sq) int32, as indices into the keys.

    query: (Sq,) int64 absolute positions of the queries; first_key: that of key 0; keys: Sk.
    """
    position = query - first_key
    low, high = torch.zeros_like(position)[None], torch.full_like(position, keys)[None]
    start = low
    if rules.documents is not None:
        bounds = documents_from_ids(rules.documents)
        low, high = bounds.start.to(torch.int64), bounds.end.to(torch.int64)
        start = low
    if rules.chunk is not None:
        counted = query[None] if rules.positions is None else rules.positions
        shift = 0 if rules.chunk_start is None else rules.chunk_start[:, None]
        begin = position - (counted - shift) % rules.chunk
        low, high = torch.maximum(low, begin), torch.minimum(high, begin + rules.chunk)
    if rules.left is not None:
        low = torch.maximum(low, position - rules.left)
    if rules.right is not None:
        high = torch.minimum(high, position + rules.right + 1)
    return _rows(low, keys, batch), _rows(high, keys, batch), _rows(start, keys, batch)


# What torch.compile must not look into, so that it computes it here and once.
torch.library.define("flashtrain::ends_so_far", "(Tensor ends) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.impl("flashtrain::ends_so_far", ("cpu", "cuda"), torch.clone)
torch.library.register_fake("flashtrain::ends_so_far", torch.empty_like)


def search(
    mask_function: Callable[..., Any], query: Tensor, first_key: int, keys: int, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `intervals` by evaluating the mask function: bisection to both sides of each query's own key.

    For torch.compile, which cannot look into a function. Correct for functions that let a query see one run of keys
    around its own position: everything `read` knows. About 20 evaluations at 2 B Sq pairs each.
    """
    batch_index = torch.arange(batch, device=query.device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=query.device)
    last = first_key + keys - 1
    own = query.clamp(first_key, last)[None].expand(batch, -1)

    def visible(key: Tensor) -> Tensor:
        inside = (key >= first_key) & (key <= last)
        return inside & mask_function(batch_index, head, query[None], key.clamp(first_key, last))

    side = torch.tensor([-1, 1], device=query.device)[:, None, None]
    ends = own.expand(2, -1, -1)
    for number, step in enumerate(_STEPS, 1):
        further = ends + step * side
        ends = torch.where(visible(further), further, ends)
        if number % 3 == 0:  # each step reads the one before twice: fused, twenty would be read a million times
            ends = torch.ops.flashtrain.ends_so_far(ends)
    low, high = ends.unbind(0)
    none = ~visible(own)
    low, high = low - first_key, high - first_key + 1
    high = torch.where(none, low, high)
    # The function does not tell where the document starts: dropout then counts from the row's first key.
    return _rows(low, keys, batch), _rows(high, keys, batch), _rows(torch.zeros_like(low), keys, batch)


def _all_of(parts: list[Rules]) -> Rules:
    """The rules that hold when all of the parts' hold."""
    lefts = [part.left for part in parts if part.left is not None]
    rights = [part.right for part in parts if part.right is not None]
    merged = Rules(min(lefts, default=None), min(rights, default=None))
    for part in parts:
        fields = {name: value for name, value in part._asdict().items() if value is not None}
        merged = merged._replace(**{name: fields[name] for name in fields if name not in ("left", "right")})
    return merged


def _held(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables a function holds from where it was made, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _rows(values: Tensor, keys: int, batch: int) -> Tensor:
    return values.clamp(0, keys).to(torch.int32).expand(batch, -1)
