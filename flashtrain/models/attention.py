"""Self-attention as a module.

    from flashtrain.models import Attention
    attention = Attention(embed=768, heads=12, causal=True, attention="flash")
    y = attention(x)                                # x and y (B, S, 768)

Shapes: B batch, S sequence, H query heads, K key/value heads, D head dimension (E /
H), E embedding width.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from flashtrain.errors import UserError, between, one_of
from flashtrain.models.attention_functions import (
    ATTENTION_FUNCTIONS,
    NO_WINDOW,
    AnyMask,
    AttentionOptions,
    PackedSequences,
    flash_packed_attention,
)
from flashtrain.models.key_value_cache import LayerCache
from flashtrain.models.sharded_sequence import next_positions, sharded_sequence
from flashtrain_kernels import flash_attn_with_kvcache
from flashtrain_kernels.arguments import MAX_HEAD_DIM


class Attention(nn.Module):
    """Self-attention (Vaswani et al. 2017), causal or not, multi-head or grouped-query
    (Ainslie et al. 2023).

    Scores are scaled by 1/sqrt(D). qkv.weight has (H + 2K) * D rows: those of query heads, then
    key heads, value heads.

    Args:
        embed: Width E of the input and the output.
        heads: Number of query heads H, which must divide E unless head_dim is given.
        kv_heads: Number of key/value heads K, which must divide H (None: H).
        causal: Whether a token sees only itself and earlier tokens.
        bias: Whether both projections have biases.
        dropout: Probability of dropping an attention weight in training, in [0, 1).
        attention: "flash" (flashtrain_kernels), "sdpa" (torch's) or "standard"
            (stores the S x S matrix).
        rotary: Module that rotates queries and keys (B, S, N, D) by positions (B, S), such as
            RotaryPositions(E // H).
        window: How many tokens a token sees, itself included (None: all); a mask replaces
            it, as it does `causal`.
        head_dim: The head dimension D (None: E / H).

    Raises:
        UserError: Sizes do not divide, the attention is unknown, or the dropout is out of range.
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
        window: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = check_heads(heads * head_dim if head_dim else embed, heads, kv_heads)
        between("dropout", dropout, 0, 1, include_high=False)
        self.heads = heads
        self.kv_heads = kv_heads
        self.causal = causal
        self.dropout = dropout
        self.attention = attention
        one_of("attention", attention, ATTENTION_FUNCTIONS)
        self.rotary = rotary
        # Of the keys' weights, to the key head of each query head (None: H / K heads each).
        self.head_map: nn.Module | None = None
        self.window = None if window is None else (window - 1, 0 if causal else window - 1)
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(embed, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.output = nn.Linear(heads * self.head_dim, embed, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | PackedSequences | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Compute the self-attention of each sequence.

        Under context parallelism (sharded_sequence.py) x is this device's shard of the sequence,
        `mask` is the mask of the whole sequence, and flash attention across the devices is used,
        whatever `attention` is.

        Args:
            x: The input, (B, S, E).
            positions: (B, S) or (1, S) integers, used by rotary only (None: 0, 1, ..., or
                continued from the cache).
            mask: Which tokens each token sees, in place of `causal` (flashtrain_kernels.masks or a
                BlockMask), for example masks.document(ids, causal=True). Or the PackedSequences of
                one packed row, to which `causal` applies; without a cache.
            cache: Keys and values of the rows' earlier tokens, which the tokens of x see; keys
                and values of x are appended to it. A mask then has S queries and, as
                keys, all tokens so far; rows of unequal lengths decode without one.

        Returns:
            The output, (B, S, E).

        Raises:
            UserError: The mask has other sizes.
        """
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        lengths, mask = (mask, None) if isinstance(mask, PackedSequences) else (None, mask)
        window = self.window if self.window is not None and mask is None else NO_WINDOW
        options = AttentionOptions(self.causal, self.scale, mask, self.active_dropout, window)
        sequence = sharded_sequence() if cache is None else None
        plain = (
            self.rotary is None
            and self.kv_heads == self.heads
            and cache is None
            and sequence is None
        )
        if self.attention == "flash" and plain and lengths is None:
            out = flash_packed_attention(qkv.unflatten(2, (3, self.heads)), options)
            return self.output(out.flatten(2))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if self.rotary is not None:
            qk = self.rotary(
                qk, next_positions(tokens, cache, x.device) if positions is None else positions
            )
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        if cache is not None:
            k, v = cache.append(k, v)
        if sequence is not None:
            assert lengths is None
            out = sequence.attention(q, k, v, **options._asdict())
        # One row sees all keys, for which a CPU has something faster.
        elif cache is not None and cache.seen is not None and (x.shape[0] > 1 or x.is_cuda):
            seen = cache.seen.clamp(max=k.shape[1])
            found = flash_attn_with_kvcache(
                q, k, v, cache_seqlens=seen, softmax_scale=self.scale, window_size=window
            )
            out = cast(Tensor, found)
        elif lengths is not None:
            out = lengths.attend(lambda q, k, v: self.inner(q, k, v, options), q, k, v)
        else:
            out = self.inner(q, k, v, options)
        return self.output(out.flatten(2))

    def inner(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Compute one of ATTENTION_FUNCTIONS; with a head_map, of the heads that it gives."""
        if self.head_map is not None:
            rows = slice(self.heads * self.head_dim, -self.kv_heads * self.head_dim)
            of = self.head_map(self.qkv.weight[rows].unflatten(0, (self.kv_heads, -1)))
            k, v = k.index_select(2, of), v.index_select(2, of)
        return ATTENTION_FUNCTIONS[self.attention](q, k, v, options)

    @property
    def active_dropout(self) -> float:
        """The probability of dropping an attention weight, which is 0 in evaluation mode."""
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, "
            f"attention={self.attention}"
        )


def check_heads(embed: int, heads: int, kv_heads: int) -> int:
    """Return the head dimension D = embed / heads; UserError where sizes do not
    divide or D is too large."""
    for name, count, of, total in (
        ("heads", heads, "embed", embed),
        ("kv_heads", kv_heads, "heads", heads),
    ):
        if count < 1 or total < 1 or total % count:
            raise UserError(f"{name}={count} must divide {of}={total}.")
    head_dim = embed // heads
    if head_dim > MAX_HEAD_DIM:
        raise UserError(
            f"head dimension {head_dim} ({embed} / {heads} heads): "
            f"expected at most {MAX_HEAD_DIM}. Use more heads."
        )
    return head_dim
