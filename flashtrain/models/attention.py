"""Multi-head attention as a module: packed QKV projection, optional rotary positions, a choice of inner attention.

    from flashtrain.models import Attention
    attention = Attention(embed=768, heads=12, causal=True, attention="flash")
    y = attention(x)                                # x and y (B, S, 768)

Shapes: B batch, S sequence, H query heads, K key/value heads, D head dimension (E / H), E embedding width.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.attention_functions import AnyMask, attention_function, flash_packed_attention
from flashtrain.models.cache import LayerCache, next_positions
from flashtrain.models.packed_sequences import PackedSequences
from flashtrain.models.spread import spread_sequence
from flashtrain_kernels import BlockMask

LARGEST_HEAD = 256


class Attention(nn.Module):
    """Self-attention (Vaswani et al. 2017), causal or not, multi-head or grouped-query (Ainslie et al. 2023).

    embed: width E of the input and the output. heads: query heads H, dividing E. kv_heads: key/value heads K, dividing
    H (None: as many as heads). causal: a token sees itself and what came before. bias: of both projections.
    dropout: probability of dropping an attention weight while training.
    attention: "flash" (flashtrain_kernels), "sdpa" (torch's) or "standard" (writes out the S x S matrix).
    rotary: a module (x (B, S, N, D), positions (B, S)) -> x for queries and keys, such as RotaryPositions(E // H).
    Scores are scaled by 1/sqrt(D). UserError: sizes that do not divide, an unknown attention, no dropout in [0, 1).

    qkv.weight has (H + 2K) * D rows: the query heads, then the key heads, then the value heads.
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
        check_dropout(dropout)
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

        positions: (B, S) or (1, S) integers, used by rotary only (None: 0, 1, ... or on from the cache).
        mask: which tokens each token sees, in place of `causal` (flashtrain_kernels.masks or a BlockMask; it holds its
            own causal rule), such as masks.document(ids, causal=True): only its own document's, and none that comes
            later. Or the PackedSequences of one packed row, with `causal` as it is; without a cache.
        cache: keys and values of earlier tokens of the same rows, which these tokens see too and are added to; a mask
            is then of S queries and of all keys so far.
        Where a row is spread over several devices (spread.py), x is this device's part, a mask is the whole row's, and
        the computing is flash attention over the devices, whatever `attention` says. UserError: a mask of other sizes.
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
        """The probability of dropping an attention weight now: 0 in evaluation."""
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
                    f"a mask of type {type(mask).__name__} where a row is spread over devices. Possible: masks of "
                    "flashtrain_kernels.masks, or a batch that is not spread."
                )
            return spread.attention(q, k, v, mask=mask, **options)
        if isinstance(mask, PackedSequences):
            return mask.attend(partial(self.inner, **options), q, k, v)
        return self.inner(q, k, v, mask=mask, **options)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, attention={self.attention}"


def check_heads(embed: int, heads: int, kv_heads: int) -> int:
    """The head dimension D = embed / heads. UserError: heads that do not divide, or are too large for the kernels."""
    if heads < 1 or embed < 1 or embed % heads:
        raise UserError(f"{heads} heads for an embedding of {embed}. Possible: a number of heads that divides {embed}.")
    if kv_heads < 1 or heads % kv_heads:
        raise UserError(f"{kv_heads} kv_heads for {heads} heads. Possible: a number of kv_heads that divides {heads}.")
    head_dim = embed // heads
    if head_dim > LARGEST_HEAD:
        raise UserError(
            f"head dimension {head_dim} ({embed} / {heads} heads). Possible: at most {LARGEST_HEAD}, so more heads."
        )
    return head_dim


def check_dropout(dropout: float) -> None:
    """UserError for what is no probability of dropping."""
    if not 0 <= dropout < 1:
        raise UserError(f"dropout {dropout:g}. Possible: 0 up to, not including, 1.")
