"""The path from every public function to the operators: check the call, make its options,
choose the implementation.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension, T packed tokens.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch, ops, sinks
from .arguments import (
    Sizes,
    autocasted,
    check_alibi,
    check_bias,
    check_dropout,
    check_mask,
    check_seed,
    check_sink,
    check_softcap,
    check_tensors,
    plain_window,
    sizes_of,
    softmax_scale_or_default,
)
from .checks import check_flag, check_window
from .dropped_weights import signed_probabilities
from .eager import Pass, attention, computed, pass_of
from .environment import autocast_dtype
from .forms import BATCH, HEADS_FIRST, Form, apart
from .launch_cache import Bounded, signature
from .masks import SEQUENCE, Mask, Sequences
from .masks.constructors import sequences
from .options import Options, band, pack, seed_tensor
from .packing import Packing, check_boundaries, check_packing
from .torch_attention import attention_by_torch

Result = Tensor | tuple[Tensor, ...]
# Calls that were checked and found right: by `key_of`, the pass that each is.
CHECKED: Bounded[tuple[Any, ...], Pass] = Bounded(4096)
_KINDS = {float, int, bool, type(None)}


class Requested(NamedTuple):
    """The arguments of `flash_attn_func` after the tensors, as the caller gave them, unchecked."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Any = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    bias: Tensor | None = None
    mask: Any = None
    dropout_seed: int | Tensor | None = None
    return_lse: bool = False
    learnable_sink: Tensor | None = None


def attend(
    form: Form, tensors: tuple[Tensor, ...], requested: Requested, packing: Packing | None = None
) -> Result:
    """Run a public function's call: return out, (out, lse) or (out, lse, S_dmask). A
    packed row's lse is (H, T)."""
    of_mask = _tensors_of(requested.mask, packing)
    key = None if of_mask is None else _key(form, tensors, of_mask, requested)
    call = None if key is None else CHECKED.get(key)
    if call is not None and key is not None and of_mask is not None:
        if packing is not None:
            check_boundaries(packing, tensors)
        given = (*tensors, *of_mask)
        if requested.dropout_p > 0:
            given = (*tensors, seed_tensor(requested.dropout_seed, tensors[0].device), *of_mask)
        repeated = computed(call, given, key[1], requested.return_lse)
        return repeated if requested.return_lse else repeated[0]

    tensors = autocasted(*tensors)
    check_tensors(form, tensors)
    if packing is not None:
        check_packing(packing, tensors)
    sink = requested.learnable_sink
    if form is HEADS_FIRST and sink is not None:  # whose kernels take the form BATCH
        form, tensors = BATCH, tuple([form.to_batch(x) for x in tensors])
    sizes = sizes_of(form, tensors, None if packing is None else packing.number)
    options = options_of(sizes, requested, packing)
    remember(key, tensors, options, of_mask or (), form)
    return_lse, return_attn_probs = requested.return_lse, requested.return_attn_probs
    out, lse = run(tensors, options, return_lse or return_attn_probs, sink, form)
    if lse is None or not (return_lse or return_attn_probs):
        return out
    if not return_attn_probs:
        return out, lse
    q, k, _ = apart([form.to_batch(x) for x in tensors])
    return out, lse, signed_probabilities(q, k, lse[None] if form.row else lse, options, packing)


def options_of(sizes: Sizes, requested: Requested, packing: Packing | None = None) -> Options:
    """Check the arguments and convert them to Options. Raises TypeError or ValueError,
    which names the argument."""
    dropout_p = requested.dropout_p
    mask = requested.mask
    alibi_slopes = requested.alibi_slopes
    bias = requested.bias
    causal, softcap, dropout_seed = requested.causal, requested.softcap, requested.dropout_seed
    check_sink(requested.learnable_sink, sizes)
    check_dropout(dropout_p)
    scale = softmax_scale_or_default(requested.softmax_scale, sizes.head_dim)
    for name in ("causal", "deterministic", "return_attn_probs", "return_lse"):
        check_flag(name, getattr(requested, name))
    window_size = plain_window(requested.window_size)
    check_window("window_size", window_size)
    check_softcap(softcap)
    check_seed(dropout_seed, sizes.device)
    check_bias(bias, sizes)
    check_mask(mask, sizes, causal, window_size)
    if packing is not None and mask is not None and not isinstance(mask, Mask):
        raise TypeError(f"mask of packed sequences must be a Mask, not {type(mask).__name__}")
    check_alibi(alibi_slopes, sizes, mask)

    left, right = None, None
    if packing is not None and mask is None:
        window = (window_size[0], 0 if causal else window_size[1])
        mask = sequences(
            packing.cu_seqlens_q, packing.cu_seqlens_k, sizes.seqlen_q, sizes.seqlen_k, window
        )
    elif not isinstance(mask, Mask):
        left, right = band(sizes.seqlen_q, sizes.seqlen_k, causal, window_size)
    if alibi_slopes is not None and alibi_slopes.dim() == 2 and alibi_slopes.shape[0] == 1:
        alibi_slopes = alibi_slopes[0]
    options = Options(
        scale=scale,
        left=left,
        right=right,
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        bias=None if bias is None else bias[(None,) * (4 - bias.dim())],
        alibi_slopes=alibi_slopes,
        seed=seed_tensor(dropout_seed, sizes.device) if dropout_p > 0 else None,
        mask=mask,
        deterministic=requested.deterministic,
    )
    packed = mask.sequences if isinstance(mask, Mask) else mask
    if isinstance(packed, Sequences):
        if sizes.batch == 1 and dispatch.finds_sequences(
            sizes.device, sizes.head_dim, sizes.dtype, options
        ):
            return options.by_boundaries(packed)
        options = options.with_mask()
    if isinstance(options.mask, Mask):
        return replace(options, mask=_ready(options.mask, options, sizes))
    return options


def _ready(mask: Mask, options: Options, sizes: Sizes) -> Mask:
    """Return the mask with a plan if kernels need one and, if dropout or (N, H) ALiBi slopes read
    sequence numbers, with numbers that differ between batch rows."""
    if dispatch.implementation_for(sizes.device.type) != "torch":
        rich, softcap = options.beyond_softcap, options.softcap > 0
        mask = mask._replace(sequences=None).planned(
            sizes.head_dim, sizes.dtype, rich=rich, softcap=softcap
        )
    slopes = options.alibi_slopes
    if options.dropout_p > 0 or (slopes is not None and slopes.dim() == 2):
        mask = _numbered_by_row(mask, sizes)
    return mask


def _numbered_by_row(mask: Mask, sizes: Sizes) -> Mask:
    """Return the mask with rows for all of the batch, each with sequence numbers of its own, if it
    has one row that all of them share; else the mask itself."""
    if sizes.batch == 1 or mask.queries.shape[1] != 1 or sizes.seqlen_q == 0:
        return mask
    rows = mask.queries.expand(-1, sizes.batch, -1)
    sequence = mask.queries[SEQUENCE]
    row = torch.arange(sizes.batch, device=sequence.device, dtype=torch.int32)[:, None]
    numbers = (sequence + row * (sequence.amax() + 1)).to(torch.int32)
    plan = mask.plan
    if plan is not None:
        forward, dq, dkdv = (table.expand(sizes.batch, -1, -1) for table in plan[:3])
        plan = plan._replace(forward=forward, dq=dq, dkdv=dkdv)
    return mask._replace(
        queries=torch.cat([rows[:SEQUENCE], numbers[None], rows[SEQUENCE + 1 :]]),
        keys=None if mask.keys is None else mask.keys.expand(sizes.batch, -1),
        plan=plan,
    )


def run(
    tensors: tuple[Tensor, ...],
    options: Options,
    with_lse: bool,
    sink: Tensor | None = None,
    form: Form = BATCH,
) -> tuple[Tensor, Tensor | None]:
    """Compute (out, lse) by the implementation for the tensors' device. Without
    with_lse, lse may be None."""
    by_torch = dispatch.by_torch(tensors[0].device)
    if sink is None and not by_torch:
        return attention(ops.FORWARD_IN[form], tensors, options)
    if form.row or form.heads_first:
        return form.of_batch(
            *run(tuple([form.to_batch(x) for x in tensors]), options, with_lse, sink)
        )
    if sink is None:
        return attention_by_torch(*apart(tensors), options, with_lse)
    # Compilers and transforms (vmap, torch.func.grad) see attention, and a formula behind it.
    if (
        not by_torch
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    ):
        return sinks.attention(tensors, options, sink)
    out, lse = (
        attention_by_torch(*apart(tensors), options, True)
        if by_torch
        else run(tensors, options, True)
    )
    return (out, None) if lse is None else sinks.joined(out, lse, sink)


# --- calls that were checked before ---------------------------------------------------------------


def key_of(
    form: Any, tensors: tuple[Tensor, ...], plain: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Return a cache key of all that checks of a call depend on: the tensors' signature, plain
    values with their types (1 is not True), autocast. None if the call cannot be cached."""
    signed = signature(tensors)
    kinds = tuple(map(type, plain))
    if signed is None or not _KINDS.issuperset(kinds):
        return None
    return form, signed, plain, kinds, autocast_dtype(tensors[0].device.type)


def remember(
    key: tuple[Any, ...] | None,
    tensors: tuple[Tensor, ...],
    options: Options,
    of_mask: tuple[Tensor, ...] = (),
    form: Form = BATCH,
) -> None:
    """Store a checked call in CHECKED under its key. Not stored: a call that has tensors besides
    `tensors`, dropout's seed and of_mask (the mask's tensors), whose dtype autocast changed, or
    that torch's attention computes."""
    if key is None or dispatch.by_torch(tensors[0].device):
        return
    if any(x.dtype != given for x, given in zip(tensors, key[1].dtypes, strict=False)):
        return
    call, given = pass_of(ops.FORWARD_IN[form], (*tensors, *pack(options)))
    of_options = of_mask if options.seed is None else (options.seed, *of_mask)
    if [id(x) for x in given[len(tensors) :]] == [id(x) for x in of_options]:
        CHECKED[key] = call


def _key(
    form: Form, tensors: tuple[Tensor, ...], of_mask: tuple[Tensor, ...], requested: Requested
) -> tuple[Any, ...] | None:
    """Return the key under which CHECKED stores this call, or None if it cannot be stored."""
    (
        dropout_p, softmax_scale, causal, window, softcap, slopes, deterministic, probabilities,
        bias, mask, seed,
        return_lse, sink,
    ) = requested  # fmt: skip
    if slopes is not None or bias is not None or sink is not None or probabilities is not False:
        return None
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        return None
    if type(window) is not tuple or len(window) != 2:
        return None
    plain = dropout_p, softmax_scale, causal, *window, softcap, deterministic, return_lse
    if mask is None:
        return key_of(form, (*tensors, *of_mask), plain)
    numbers = _numbers_of(mask, tensors[0].device)
    return None if numbers is None else key_of(form, (*tensors, *of_mask), (*plain, *numbers))


def _tensors_of(mask: Any, packing: Packing | None) -> tuple[Tensor, ...] | None:
    """Return the mask's tensors, or cu_seqlens of packed sequences, in the order of `pack`. None:
    the call cannot be stored in CHECKED, as with a BlockMask or an unplanned Mask of documents."""
    if mask is None:
        return () if packing is None else packing[:2]
    if type(mask) is not Mask:
        return None
    if type(mask.sequences) is Sequences and mask.plan is None:
        ends = mask.sequences[:2]
        return (
            ends if packing is None or (ends[0] is packing[0] and ends[1] is packing[1]) else None
        )
    if mask.sequences is not None or mask.plan is None or packing is not None:
        return None
    tables = mask.plan[:3]
    return (mask.queries, *tables) if mask.keys is None else (mask.queries, mask.keys, *tables)


def _numbers_of(mask: Mask, device: torch.device) -> tuple[Any, ...] | None:
    """Return the sizes of a mask that decide, besides the tensors that `_tensors_of` returns,
    whether a call with it is valid. None: the call must be checked each time."""
    if mask.plan is not None:
        return mask.keys is None, mask.seqlen_k, *mask.plan.blocks
    given, queries = mask.sequences, mask.queries
    if given is None or mask.keys is not None or not isinstance(queries, Tensor):
        return None
    if queries.dtype != torch.int32 or queries.device != device:
        return None
    return *queries.shape, mask.seqlen_k, given.seqlen_q, given.seqlen_k, *given.window
