"""What every public function does once its tensors are checked: make the options, run, give what was asked for. Where
our kernels cannot run (CPU tensors, Apple GPUs) torch's scaled_dot_product_attention runs what it can express, and the
reference the rest.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension, T packed tokens.
"""

import logging
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import autograd, dispatch, reference, sinks
from .arguments import (
    Sizes,
    check_alibi,
    check_bias,
    check_dropout,
    check_ends,
    check_flag,
    check_mask,
    check_seed,
    check_sink,
    check_softcap,
    plain_window,
    softmax_scale_or_default,
)
from .environment import autocast_dtype, constant
from .masks import SEQUENCE, Mask, Sequences
from .masks.constructors import check_window, sequences
from .ops import BATCH, FORWARD_IN, ROW, apart, call_of, of_batch, to_batch
from .options import Options, band, pack, seed_tensor
from .remembered import Bounded
from .replay import Pass, signature

# The function is bound here, at the import: whoever later routes torch's own calls to ours makes no circle.
_logger = logging.getLogger("flashtrain_kernels")
_said = False


@constant
def _say_once(device_type: str) -> bool:
    """Log one line a process. Under torch.compile this runs once, while the graph is traced."""
    global _said
    if not _said:
        _said = True
        _logger.warning(
            "tensors are on %s: attention runs by torch's scaled_dot_product_attention, and with softcap, dropout or "
            "log-sum-exp by plain PyTorch (the Triton kernels need an NVIDIA GPU)",
            device_type,
        )
    return True


def attention_by_torch(
    q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q (B, Sq, H, D), k, v (B, Sk, K, D) -> out (B, Sq, H, D), and the log-sum-exp (B, H, Sq) or None.

    torch's attention has no softcap and returns no log-sum-exp, and its dropout draws other numbers than the kernels'.
    Where one of these is asked for the reference computes, which stores the whole matrix.
    """
    _say_once(q.device.type)
    if autocast_dtype(q.device.type) is not None:  # the inputs are cast; a bias in float32 stays so
        with torch.autocast(q.device.type, enabled=False):
            return attention_by_torch(q, k, v, options, with_lse)
    # Statements, not expressions: under torch.compile a comparison of sizes may be a symbol, which torch's call
    # refuses.
    grouped = False
    if q.shape[2] != k.shape[2]:
        grouped = True
    unmasked = options.mask is None and options.bias is None and options.alibi_slopes is None and options.left is None
    top_left = False
    if unmasked and options.right is not None and options.right == 0:  # where torch's alignment is ours
        top_left = True
    masked = not (top_left or (unmasked and options.right is None))
    exact = with_lse or options.softcap > 0 or options.dropout_p > 0
    if (masked or top_left) and not exact:
        # torch multiplies the weight 0 of a masked pair with what is there, and 0 * NaN is NaN.
        finite = _is_finite(q, k, v, options.bias)
        if finite is False or (finite is None and masked):
            q, k, v = _unseen_as_zeros(q, k, v, options)
            exact = finite is False and _is_finite(q, k, v, options.bias) is False
    if exact:
        # The operators exist for the CPU and CUDA; elsewhere autograd calls the same functions directly.
        if q.device.type in ("cpu", "cuda"):
            return autograd.attention((q, k, v), options)
        return reference.apply(q, k, v, options)
    mask, hidden = _mask(q, k, options) if masked else (None, None)
    if top_left:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]  # nobody sees the others
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=top_left,
        scale=options.scale,
        enable_gqa=grouped,
    )
    out = out.transpose(1, 2)  # first: what masked_fill returns is contiguous
    return out if hidden is None else out.masked_fill(hidden.transpose(1, 2), 0.0), None


def _mask(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """torch's attn_mask (B or 1, H or 1, Sq, Sk), and the rows (B or 1, H or 1, Sq, 1) that see nothing.

    Those rows are let see everything, so that nothing is NaN, and the caller takes their result out again.
    """
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    seen = reference.visible_mask(seqlen_q, seqlen_k, options, q.device).expand(-1, -1, seqlen_q, seqlen_k)
    hidden = ~seen.any(-1, keepdim=True)
    added = options.bias
    if options.alibi_slopes is not None:
        exact = torch.promote_types(q.dtype, torch.float32)
        slopes = reference.alibi(batch, seqlen_q, seqlen_k, options, exact)
        added = slopes if added is None else slopes + added
    if added is None:
        return seen | hidden, hidden
    return torch.where(seen, added, -torch.inf).masked_fill(hidden, 0.0), hidden


def _is_finite(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool | None:
    """Is every number finite, but for a bias's -inf? None where that is not known: compilers and transforms allow no
    look, and other devices would be waited for. Sums that overflow count as numbers that do."""
    if q.device.type != "cpu" or signature((q, k, v)) is None:
        return None
    exact = torch.promote_types(q.dtype, torch.bfloat16)  # float16 overflows soon
    with torch.no_grad():
        total = q.sum(dtype=exact) + k.sum(dtype=exact) + v.sum(dtype=exact)
        return math.isfinite(total) and (bias is None or bool(bias.sum(dtype=exact) < math.inf))


def _unseen_as_zeros(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with zeros in the queries that see nothing and in the keys that nobody sees."""
    seen = reference.visible_mask(q.shape[1], k.shape[1], options, q.device)
    seen = seen.expand(-1, -1, q.shape[1], k.shape[1])
    blind, unseen = ~seen.any(-1), ~seen.any(-2)  # (B or 1, H or 1, Sq) and (..., Sk)
    if unseen.shape[1] != 1:
        unseen = unseen.unflatten(1, (k.shape[2], -1)).all(2)  # by all heads of the key's group
    blind, unseen = (x.transpose(1, 2)[..., None] for x in (blind, unseen))
    return q.masked_fill(blind, 0.0), k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)


Result = Tensor | tuple[Tensor, ...]


class Packing(NamedTuple):
    """The sequences of a packed row, checked."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor
    max_seqlen_k: int | Tensor


class Asked(NamedTuple):
    """flash-attn's arguments after the tensors, and ours, as they were given."""

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


def sizes_of(q: Tensor, k: Tensor, packing: Packing | None = None) -> Sizes:
    """Of tensors that are checked; k may also be kv or qkv, and q qkv. With `packing` they are (T, ..., heads, D)."""
    rows = (1, q.shape[0], k.shape[0]) if packing is not None else (q.shape[0], q.shape[1], k.shape[1])
    sequences = rows[0] if packing is None else packing.cu_seqlens_q.shape[0] - 1
    return Sizes(*rows, q.shape[-2], k.shape[-2], q.shape[-1], sequences, q.dtype, q.device)


def options_of(
    sizes: Sizes,
    packing: Packing | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    bias: Tensor | None = None,
    mask: Any = None,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Options:
    """flash-attn's arguments, checked, in the one form of everything below. Raises TypeError or ValueError naming the
    argument."""
    check_dropout(dropout_p)
    scale = softmax_scale_or_default(softmax_scale, sizes.head_dim)
    flags = {"causal": causal, "deterministic": deterministic}
    for name, value in {**flags, "return_attn_probs": return_attn_probs, "return_lse": return_lse}.items():
        check_flag(name, value)
    window_size = plain_window(window_size)
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
        mask = sequences(packing.cu_seqlens_q, packing.cu_seqlens_k, sizes.seqlen_q, sizes.seqlen_k, window)
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
        deterministic=deterministic,
    )
    packed = mask.sequences if isinstance(mask, Mask) else mask
    if isinstance(packed, Sequences):
        if sizes.batch == 1 and dispatch.finds_sequences(sizes.device, sizes.head_dim, sizes.dtype, options):
            return options.by_boundaries(packed)
        options = options.with_mask()
    return replace(options, mask=_ready(options.mask, options, sizes)) if isinstance(options.mask, Mask) else options


def _ready(mask: Mask, options: Options, sizes: Sizes) -> Mask:
    """The mask with its plan, where kernels will read it, and with numbered sequences where they count."""
    if dispatch.implementation_for(sizes.device.type) != "torch":
        rich, softcap = options.beyond_softcap, options.softcap > 0
        mask = mask._replace(sequences=None).planned(sizes.head_dim, sizes.dtype, rich=rich, softcap=softcap)
    slopes = options.alibi_slopes
    if options.dropout_p > 0 or (slopes is not None and slopes.dim() == 2):
        mask = _numbered_by_row(mask, sizes)
    return mask


def _numbered_by_row(mask: Mask, sizes: Sizes) -> Mask:
    """A mask that all rows of the batch share, with sequence numbers that differ from row to row."""
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
    tensors: tuple[Tensor, ...], options: Options, with_lse: bool, sink: Tensor | None = None, form: str = BATCH
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of (q, k, v), (q, kv) or (qkv,) in this form (ops.py); lse may be None without with_lse."""
    device_type = tensors[0].device.type
    # Of meta tensors the operators say the shapes.
    by_torch = device_type != "meta" and dispatch.implementation_for(device_type) == "torch"
    if sink is None and not by_torch:
        return autograd.attention(tensors, options, form)
    if form != BATCH:
        return of_batch(*run(tuple([to_batch(x, form) for x in tensors]), options, with_lse, sink), form)
    if sink is None:
        return attention_by_torch(*apart(tensors), options, with_lse)
    # Compilers and transforms (vmap, torch.func.grad) see attention, and a formula behind it.
    if not by_torch and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        return sinks.attention(tensors, options, sink)
    out, lse = attention_by_torch(*apart(tensors), options, True) if by_torch else autograd.attention(tensors, options)
    return (out, None) if lse is None else sinks.joined(out, lse, sink)


# Calls whose arguments were checked and found right, and the pass that they are.
_CHECKED: Bounded[tuple[Any, ...], Pass] = Bounded(4096)
_KINDS = {float, int, bool, type(None)}


def key_of(function: str, tensors: tuple[Tensor, ...], plain: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that checking a call depends on: its tensors' signature, plain values with their types (1 is not True), and
    autocast. None where that cannot be said."""
    signed = signature(tensors)
    kinds = tuple([type(value) for value in plain])
    if signed is None or not _KINDS.issuperset(kinds):
        return None
    return function, signed, plain, kinds, autocast_dtype(tensors[0].device.type)


def known(key: tuple[Any, ...] | None) -> Pass | None:
    """The pass of a call that was checked before."""
    return None if key is None else _CHECKED.get(key)


def remember(
    key: tuple[Any, ...] | None,
    tensors: tuple[Tensor, ...],
    options: Options,
    of_mask: tuple[Tensor, ...] = (),
    form: str = BATCH,
) -> None:
    """Keep a call that was checked, of no tensors but these, dropout's seed and its mask's, where our kernels run it
    and autocast changed nothing."""
    if key is None or dispatch.implementation_for(tensors[0].device.type) == "torch":
        return
    if any(x.dtype != given[2] for x, given in zip(tensors, key[1][2:], strict=False)):
        return
    call, given = call_of(FORWARD_IN[form][len(tensors)], (*tensors, *pack(options)))
    of_options = of_mask if options.seed is None else (options.seed, *of_mask)
    if [id(x) for x in given[len(tensors) :]] == [id(x) for x in of_options]:
        _CHECKED[key] = call


def _tensors_of(mask: Any, packing: Packing | None) -> tuple[Tensor, ...] | None:
    """A mask's, or a packed row's boundaries, in the order of `pack`, where a call with it is run as it is; None where
    more is to be decided."""
    if mask is None:
        return () if packing is None else packing[:2]
    if type(mask) is not Mask:
        return None
    if type(mask.sequences) is Sequences and mask.plan is None:
        ends = mask.sequences[:2]
        return ends if packing is None or (ends[0] is packing[0] and ends[1] is packing[1]) else None
    if mask.sequences is not None or mask.plan is None or packing is not None:
        return None
    tables = mask.plan[:3]
    return (mask.queries, *tables) if mask.keys is None else (mask.queries, mask.keys, *tables)


def _check_packing_again(packing: Packing, tensors: tuple[Tensor, ...]) -> None:
    """What a packed row's boundaries hold, where tensors like them were right."""
    cu_q, cu_k, longest_q, longest_k = packing
    if len(tensors) == 1:  # (qkv,), with one cu_seqlens
        return check_ends("cu_seqlens", cu_q, tensors[0].shape[0], "max_seqlen", longest_q)
    tokens_q, tokens_k = tensors[0].shape[0], tensors[-1].shape[0]
    check_ends("cu_seqlens_q", cu_q, tokens_q, "max_seqlen_q", longest_q)
    if cu_k is not cu_q or longest_k is not longest_q or tokens_k != tokens_q:
        check_ends("cu_seqlens_k", cu_k, tokens_k, "max_seqlen_k", longest_k)


def _numbers_of(mask: Mask, device: torch.device) -> tuple[Any, ...] | None:
    """What else checking a call with this mask depends on, besides `_tensors_of` it; None: it is not known."""
    if mask.plan is not None:
        return mask.keys is None, mask.seqlen_k, *mask.plan.blocks
    given, queries = mask.sequences, mask.queries
    if given is None or mask.keys is not None or not isinstance(queries, Tensor):
        return None
    if queries.dtype != torch.int32 or queries.device != device:
        return None
    return *queries.shape, mask.seqlen_k, given.seqlen_q, given.seqlen_k, *given.window


def attend_again(
    tensors: tuple[Tensor, ...], asked: Asked, packing: Packing | None = None, form: str = BATCH
) -> tuple[Result | None, tuple[Any, ...] | None]:
    """(The result of a call whose like was checked before, or None; the key to remember it by, if it can be)."""
    seed = asked.dropout_seed
    if not (asked.alibi_slopes is None and asked.bias is None and asked.learnable_sink is None):
        return None, None
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        return None, None
    mask, of_mask = asked.mask, _tensors_of(asked.mask, packing)
    if of_mask is None:
        return None, None
    window, return_lse = asked.window_size, asked.return_lse
    if asked.return_attn_probs is not False or type(window) is not tuple or len(window) != 2:
        return None, None
    plain = asked.dropout_p, asked.softmax_scale, asked.causal, *window, asked.softcap, asked.deterministic, return_lse
    tensors = (*tensors, *of_mask)
    if mask is not None:
        numbers = _numbers_of(mask, tensors[0].device)
        if numbers is None:
            return None, None
        plain = (*plain, *numbers)
    key = key_of(form if packing is None else ROW, tensors, plain)
    call = known(key)
    if key is None or call is None:
        return None, key
    given = len(tensors) - len(of_mask)
    if packing is not None:
        _check_packing_again(packing, tensors[:given])
    if asked.dropout_p > 0:
        tensors = (*tensors[:given], seed_tensor(seed, tensors[0].device), *of_mask)
    out, lse = autograd.computed(call, tensors, key[1])
    return ((out, lse) if return_lse else out), key


def attend(
    tensors: tuple[Tensor, ...],
    packing: Packing | None,
    asked: Asked,
    key: tuple[Any, ...] | None = None,
    form: str = BATCH,
) -> Result:
    """flash-attn's call on tensors that are checked, (q, k, v), (q, kv) or (qkv,), and with `packing` are packed rows.

    Returns out, or (out, lse), or flash-attn's (out, lse, S_dmask); the lse of a packed row is (H, T). key: of
    `attend_again`. form: of the tensors (ops.py), without `packing`.
    """
    form = form if packing is None else ROW
    batched = tensors if packing is not None else tuple([to_batch(x, form) for x in tensors])
    sizes = sizes_of(batched[0], batched[-1], packing)
    *arguments, sink = asked
    check_sink(sink, sizes)
    options = options_of(sizes, packing, *arguments)
    remember(key, tensors, options, _tensors_of(asked.mask, packing) or (), form)
    return_lse, return_attn_probs = asked.return_lse, asked.return_attn_probs
    out, lse = run(tensors, options, return_lse or return_attn_probs, sink, form)
    if lse is None or not (return_lse or return_attn_probs):
        return out
    if not return_attn_probs:
        return out, lse
    q, k, _ = apart([to_batch(x, form) for x in tensors])
    return out, lse, signed_probabilities(q, k, lse[None] if form == ROW else lse, options, packing)


@torch.no_grad()
def signed_probabilities(q: Tensor, k: Tensor, lse: Tensor, options: Options, packing: Packing | None = None) -> Tensor:
    """flash-attn's S_dmask, for tests of dropout: (0,) without dropout, else (B, H, Sq, Sk) in q's dtype.

    The attention weights before dropout, with the sign set where dropout dropped them (-0.0 where a weight is 0). For
    packed sequences (N, H, max_seqlen_q, max_seqlen_k), 0 past their ends.
    """
    if options.dropout_p == 0:
        return q.new_empty((0,))
    weights = reference.probabilities(q, k, lse, options).to(q.dtype)
    weights = torch.where(reference.dropout_mask(q.shape, k.shape, options, q.device), weights, -weights)
    if packing is None:
        return weights
    queries, real_queries = _places(packing.cu_seqlens_q, packing.max_seqlen_q, q.shape[1])
    keys, real_keys = _places(packing.cu_seqlens_k, packing.max_seqlen_k, k.shape[1])
    if q.shape[1] == 0 or k.shape[1] == 0:
        return weights.new_zeros((queries.shape[0], q.shape[2], queries.shape[1], keys.shape[1]))
    apart = weights[0][:, queries[:, :, None], keys[:, None, :]].transpose(0, 1)  # (N, H, queries, keys)
    return torch.where((real_queries[:, :, None] & real_keys[:, None, :])[:, None], apart, 0.0)


def _places(cu_seqlens: Tensor, longest: int | Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(N, longest): the index of each sequence's tokens in the packed row, and which of them exist."""
    index = cu_seqlens[:-1, None] + torch.arange(int(longest), device=cu_seqlens.device)
    return index.clamp(max=max(total - 1, 0)), index < cu_seqlens[1:, None]
