"""Self-attention as a module, computed by one of three equivalent functions (flash, sdpa, standard).

    from flashtrain.models import Attention
    attention = Attention(embed=768, heads=12, causal=True, attention="flash")
    y = attention(x)                                # x and y (B, S, 768)

The inner attention is softmax(q k^T scale) v. The three functions agree up to rounding:
- causal is aligned bottom-right: the last query sees every key, as queries after a key/value cache need;
- a mask (flashtrain_kernels.masks, or a BlockMask) replaces `causal`: it contains its own causal rule;
- grouped-query attention: query head h reads key/value head h // (H // K);
- dropout is the probability of dropping an attention weight; the others are divided by 1 - dropout. Each function draws
  its own random numbers, so different weights are dropped;
- a query that sees no key gives zeros.

Shapes: B batch, S sequence (Sq queries, Sk keys), H query heads, K key/value heads, D head dimension (E / H), E
embedding width. q (B, Sq, H, D); k and v (B, Sk, K, D); result (B, Sq, H, D).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError, between, one_of
from flashtrain.models.cache import LayerCache, PackedSequences, next_positions, spread_sequence
from flashtrain_kernels import BlockMask, Mask, dispatch, flash_attn_func, flash_attn_qkvpacked_func, masks
from flashtrain_kernels.environment import autocast_dtype

InnerAttention = Callable[..., Tensor]
AnyMask = Mask | BlockMask
LARGEST_HEAD = 256  # head dimension, in the kernels


def takes_block_rows(q: Tensor, k: Tensor, v: Tensor, mask: object) -> bool:
    """Whether block_rows_attention can compute this call: without gradients (each block's would be as large as all
    keys), outside torch.compile, with one pattern of whole blocks for all rows and heads, and no band."""
    if not isinstance(mask, BlockMask) or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    shared = mask.query_rows.shape[:2] == (1, 1)
    whole = mask.seqlen_q % mask.block_size[0] == 0 and mask.seqlen_k % mask.block_size[1] == 0
    return shared and whole and mask.left is None and mask.right is None


def block_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: BlockMask, dropout: float = 0.0
) -> Tensor:
    """softmax(q k^T scale) v by blocks of queries, each with the keys that it sees; 0 where it sees none.

    It evaluates block-sparse models on a CPU, where our kernels do not run and a dense mask of 65,536 pixels takes
    4 GiB. q (B, Sq, H, D); k and v (B, Sk, K, D); result (B, Sq, H, D). The call must satisfy takes_block_rows.
    """
    size_q, size_k = mask.block_size
    keys, values = (tensor.transpose(1, 2).unflatten(2, (-1, size_k)) for tensor in (k, v))  # (B, K, nk, size_k, D)
    out = torch.zeros_like(q)
    for number, (begin, _, end) in enumerate(mask.query_rows[0, 0].tolist()):
        if begin == end:
            continue
        seen = mask.query_blocks[begin:end].long()
        here = slice(number * size_q, (number + 1) * size_q)
        found = F.scaled_dot_product_attention(
            q[:, here].transpose(1, 2),
            keys[:, :, seen].flatten(2, 3),
            values[:, :, seen].flatten(2, 3),
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        out[:, here] = found.transpose(1, 2)
    return out


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """flashtrain_kernels' exact FlashAttention (Dao et al. 2022): memory linear in S."""
    check_mask(mask, q, k)
    out = flash_attn_func(q, k, v, dropout, softmax_scale=scale, causal=causal and mask is None, mask=mask)
    return cast(Tensor, out)  # without return_lse it is the output alone


def flash_packed_attention(
    qkv: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """flash_attention of one projection's output qkv (B, S, 3, H, D), which is neither split nor copied."""
    check_mask(mask, qkv, qkv)
    out = flash_attn_qkvpacked_func(qkv, dropout, softmax_scale=scale, causal=causal and mask is None, mask=mask)
    return cast(Tensor, out)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """torch's scaled_dot_product_attention, which picks its own kernel (an S x S mask is built only where needed)."""
    if takes_block_rows(q, k, v, mask):
        check_mask(mask, q, k)
        return block_rows_attention(q, k, v, scale=scale, mask=cast(BlockMask, mask), dropout=dropout)
    queries, keys = q.shape[1], k.shape[1]
    # torch aligns is_causal top-left, which is bottom-right only for as many queries as keys.
    plain_causal = causal and mask is None and queries == keys
    visible = None if plain_causal else visible_keys(q, k, causal, mask)
    blind = _blind_queries(visible, q, k, mask)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        # A query that sees no key is given all of them, so that no NaN arises; its result is zeroed below.
        attn_mask=visible if visible is None or blind is None else visible | blind,
        dropout_p=dropout,
        is_causal=plain_causal and queries > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: AnyMask | None = None, dropout: float = 0.0
) -> Tensor:
    """The paper's baseline (Dao et al. 2022, Algorithm 0), which stores the whole Sq x Sk matrix."""
    visible = visible_keys(q, k, causal, mask)
    blind = _blind_queries(visible, q, k, mask)
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-2, -1)) * scale
    if visible is not None:
        # The most negative number, not -inf: a row that is hidden throughout must not become NaN, here or in backward.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    probabilities = F.dropout(torch.softmax(scores, dim=-1), dropout).to(v.dtype)
    out = probabilities @ v
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)


ATTENTION_FUNCTIONS: dict[str, InnerAttention] = {
    "flash": flash_attention,
    "sdpa": sdpa_attention,
    "standard": standard_attention,
}


def attention_function(name: str) -> InnerAttention:
    """The inner attention of that name; UserError for an unknown one."""
    one_of("attention", name, ATTENTION_FUNCTIONS)
    return ATTENTION_FUNCTIONS[name]


def plan_mask(
    mask: AnyMask | None, x: Tensor, *, attention: str, head_dim: int, dropout: float = 0.0
) -> AnyMask | None:
    """The mask with the plan that the kernels read, made once a batch instead of in every layer.

    Only flash uses plans, and only where our kernels run; otherwise the mask is returned as it is, like a BlockMask,
    which is its own plan.

    Args:
        x: The layers' input; attention computes in its dtype, or in autocast's.
        dropout: The probability that attention will be called with (0 in evaluation).
    """
    if (
        mask is None
        or isinstance(mask, BlockMask)
        or attention != "flash"
        or dispatch.implementation_for(x.device.type) == "torch"
    ):
        return mask
    # Autocast leaves float64 alone.
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype
    return mask.planned(head_dim, dtype, rich=dropout > 0)


def visible_keys(q: Tensor, k: Tensor, causal: bool, mask: AnyMask | None) -> Tensor | None:
    """Which keys each query sees: bool, (B or 1, 1 or H, Sq, Sk); None where every query sees every key."""
    check_mask(mask, q, k)
    if mask is None:
        if not causal or q.shape[1] == 1:
            return None
        mask = masks.causal(q.shape[1], k.shape[1], device=q.device)
    return mask.dense() if isinstance(mask, BlockMask) else mask.dense()[:, None]


def check_mask(mask: AnyMask | None, q: Tensor, k: Tensor) -> None:
    """Raise UserError unless the mask has the sizes of q and k, or one row for all."""
    if mask is None:
        return
    if isinstance(mask, BlockMask):
        rows, queries = mask.query_rows.shape[0], mask.seqlen_q
    else:
        rows, queries = mask.queries.shape[1], mask.queries.shape[2]
    if queries != q.shape[1] or mask.seqlen_k != k.shape[1] or (rows != 1 and rows != q.shape[0]):
        raise UserError(
            f"mask of {rows} rows, {queries} queries and {mask.seqlen_k} keys does not match q and k: expected 1 or "
            f"{q.shape[0]} rows, {q.shape[1]} queries and {k.shape[1]} keys."
        )


def _blind_queries(visible: Tensor | None, q: Tensor, k: Tensor, mask: AnyMask | None) -> Tensor | None:
    """The queries that see no key: bool, (B or 1, 1, Sq, 1); None where there cannot be any."""
    if visible is None or (mask is None and q.shape[1] <= k.shape[1]):
        return None
    return ~visible.any(-1, keepdim=True)


class Attention(nn.Module):
    """Self-attention (Vaswani et al. 2017), causal or not, multi-head or grouped-query (Ainslie et al. 2023).

    Scores are scaled by 1/sqrt(D). qkv.weight has (H + 2K) * D rows: query heads, key heads, value heads.

    Args:
        embed: Width E of the input and the output.
        heads: Query heads H, which must divide E.
        kv_heads: Key/value heads K, which must divide H (None: H).
        causal: Whether a token sees only itself and earlier tokens.
        bias: Whether both projections have biases.
        dropout: Probability of dropping an attention weight in training, in [0, 1).
        attention: "flash" (flashtrain_kernels), "sdpa" (torch's) or "standard" (stores the S x S matrix).
        rotary: Module (x (B, S, N, D), positions (B, S)) -> x for queries and keys, e.g. RotaryPositions(E // H).

    Raises:
        UserError: Sizes that do not divide, an unknown attention, or a dropout out of range.
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        attention: str = "flash",
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = check_heads(embed, heads, kv_heads)
        between("dropout", dropout, 0, 1, include_high=False)
        self.heads = heads
        self.kv_heads = kv_heads
        self.causal = causal
        self.dropout = dropout
        self.attention = attention
        self.inner = attention_function(attention)
        self.rotary = rotary
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(embed, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.output = nn.Linear(embed, embed, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | PackedSequences | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (B, S, E) -> (B, S, E).

        Where a row is sharded over devices (cache.py), x is this device's shard, a mask is the whole row's, and flash
        attention over the devices computes it, whatever `attention` is.

        Args:
            positions: (B, S) or (1, S) integers, used by rotary only (None: 0, 1, ..., or continued from the cache).
            mask: Which tokens each token sees, in place of `causal` (flashtrain_kernels.masks or a BlockMask), for
                example masks.document(ids, causal=True). Or the PackedSequences of one packed row, to which `causal`
                applies; without a cache.
            cache: Keys and values of earlier tokens of the same rows, which these tokens see and are appended to. A
                mask then has S queries and all keys so far.

        Raises:
            UserError: A mask of other sizes.
        """
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        whole = cache is not None or spread_sequence() is None
        plain = self.rotary is None and self.kv_heads == self.heads and cache is None
        if self.attention == "flash" and plain and whole and not isinstance(mask, PackedSequences):
            packed = qkv.unflatten(2, (3, self.heads))
            out = flash_packed_attention(
                packed, causal=self.causal, scale=self.scale, mask=mask, dropout=self.active_dropout
            )
        else:
            out = self._inner_separate(qkv, positions, mask, cache)
        return self.output(out.flatten(2))

    @property
    def active_dropout(self) -> float:
        """The current probability of dropping an attention weight: 0 in evaluation."""
        return self.dropout if self.training else 0.0

    def _inner_separate(
        self,
        qkv: Tensor,
        positions: Tensor | None,
        mask: AnyMask | PackedSequences | None,
        cache: LayerCache | None,
    ) -> Tensor:
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if self.rotary is not None:
            if positions is None:
                positions = next_positions(qkv.shape[1], cache, qkv.device)
            qk = self.rotary(qk, positions)
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        if cache is not None:
            k, v = cache.append(k, v)
        options = {"causal": self.causal, "scale": self.scale, "dropout": self.active_dropout}
        spread = spread_sequence() if cache is None else None
        if spread is not None:
            if isinstance(mask, PackedSequences | BlockMask):
                raise UserError(
                    f"mask of type {type(mask).__name__} is not supported under context parallelism. Use a mask of "
                    "flashtrain_kernels.masks."
                )
            return spread.attention(q, k, v, mask=mask, **options)
        if isinstance(mask, PackedSequences):
            return mask.attend(partial(self.inner, **options), q, k, v)
        return self.inner(q, k, v, mask=mask, **options)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, attention={self.attention}"


def check_heads(embed: int, heads: int, kv_heads: int) -> int:
    """The head dimension D = embed / heads; UserError where heads do not divide or are too large for the kernels."""
    for name, count, of, total in (("heads", heads, "embed", embed), ("kv_heads", kv_heads, "heads", heads)):
        if count < 1 or total < 1 or total % count:
            raise UserError(f"{name}={count} must divide {of}={total}.")
    head_dim = embed // heads
    if head_dim > LARGEST_HEAD:
        raise UserError(
            f"head dimension {head_dim} ({embed} / {heads} heads): expected at most {LARGEST_HEAD}. Use more heads."
        )
    return head_dim
