"""What the tests of flash_attn_with_kvcache share: a call with random tensors, and what it must
give, computed sequence by sequence in float64 from flash-attn's words."""

from typing import Any, NamedTuple

import torch
from plain_formula import plain_attention, window_pairs

import flashtrain_kernels as fk


class Case(NamedTuple):
    """batch sequences of seqlen_q queries and `new` keys (0: none) over caches of `capacity` rows,
    in pages of `page` rows (0: no pages). rotary: R. window: flash-attn's."""

    seqlen_q: int = 1
    new: int = 1
    capacity: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page: int = 0
    rotary: int = 0
    interleaved: bool = True
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    leftpad: bool = False
    batch_index: bool = False
    splits: int = 0
    batch: int = 3
    value_dim: int = 0  # 0: as head_dim

    def __str__(self) -> str:
        changed = [
            f"{name}{value}"
            for name, value in self._asdict().items()
            if value != self._field_defaults[name]
        ]
        return "-".join(changed).replace(" ", "") or "plain"

    def arguments(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
        """Every argument of the call, by name."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        rows = (self.kv_heads, self.head_dim)
        values = (self.kv_heads, self.value_dim or self.head_dim)
        given: dict[str, Any] = {"q": draw(self.batch, self.seqlen_q, self.heads, self.head_dim)}
        if self.page:
            columns = -(-self.capacity // self.page)
            pages = 2 * self.batch * columns
            order = torch.randperm(pages, generator=generator)[: self.batch * columns]
            given["block_table"] = order.int().view(self.batch, columns)
            shape: tuple[int, ...] = (pages, self.page)
        else:
            caches = 2 * self.batch if self.batch_index else self.batch
            shape = (caches, self.capacity)
            if self.batch_index:
                given["cache_batch_idx"] = torch.randperm(caches, generator=generator)[
                    : self.batch
                ].int()
        given["k_cache"], given["v_cache"] = draw(*shape, *rows), draw(*shape, *values)
        if self.new:
            given["k"], given["v"] = (
                draw(self.batch, self.new, *rows),
                draw(self.batch, self.new, *values),
            )
        if self.rotary:
            angle = (
                torch.rand(self.capacity + self.page, self.rotary // 2, generator=generator) * 6.3
            )
            given["rotary_cos"], given["rotary_sin"] = angle.cos().to(dtype), angle.sin().to(dtype)
            given["rotary_interleaved"] = self.interleaved
        # The last sequence is full, the first empty, unless its padding takes all of it.
        most = self.capacity - max(self.new, self.seqlen_q if self.rotary else 0)
        lengths = torch.randint(0, most + 1, (self.batch,), generator=generator)
        lengths[0], lengths[-1] = 0, most
        given["cache_seqlens"] = lengths.int()
        if self.leftpad:
            given["cache_leftpad"] = (lengths // 3).int()
        if self.alibi:
            given["alibi_slopes"] = torch.rand(self.batch, self.heads, generator=generator)
        return given | {
            "causal": self.causal, "window_size": self.window, "softcap": self.softcap,
            "num_splits": self.splits,
            "return_softmax_lse": True,
        }  # fmt: skip


def turned(x, positions, cos, sin, interleaved):
    """x (S, heads, D) by the positions (S,), pair by pair of dimensions."""
    x = x.clone()
    half = cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        c, s = cos[positions, i][:, None], sin[positions, i][:, None]
        x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return x


def expected(case: Case, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """out, lse, and the caches afterwards, in float64."""
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    k_cache, v_cache = exact["k_cache"].clone(), exact["v_cache"].clone()
    outs, lses = [], []
    for b in range(case.batch):
        filled = int(exact["cache_seqlens"][b])
        pages = (
            exact["block_table"][b].long()
            if case.page
            else exact.get("cache_batch_idx", torch.arange(case.batch))[b : b + 1].long()
        )
        size = k_cache.shape[1]
        place = [(int(pages[row // size]), row % size) for row in range(len(pages) * size)]
        q = exact["q"][b]
        if case.new:
            k, v = exact["k"][b], exact["v"][b]
            if case.rotary:
                rotary = exact["rotary_cos"], exact["rotary_sin"], case.interleaved
                k = turned(k, filled + torch.arange(case.new), *rotary)
                moving = case.causal or case.window != (-1, -1)
                q = turned(q, filled + torch.arange(case.seqlen_q) * moving, *rotary)
            for i in range(case.new):
                k_cache[place[filled + i]], v_cache[place[filled + i]] = k[i], v[i]
        pad = int(exact["cache_leftpad"][b]) if case.leftpad else 0
        rows = place[pad : filled + case.new]
        keys, values = (
            torch.stack([cache[at] for at in rows]) if rows else cache[0, :0]
            for cache in (k_cache, v_cache)
        )
        seen = window_pairs(case.seqlen_q, len(rows), *case.window, case.causal)
        slopes = exact["alibi_slopes"][b] if case.alibi else None
        out, lse = plain_attention(
            q[None], keys[None], values[None], seen=seen, softcap=case.softcap, slopes=slopes
        )
        outs.append(out)
        lses.append(lse)
    return {"out": torch.cat(outs), "lse": torch.cat(lses), "k_cache": k_cache, "v_cache": v_cache}


def assert_equals_the_formula(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    """The outputs, and what is in the cache afterwards."""
    arguments = case.arguments(dtype)
    wanted = expected(case, arguments)
    out, lse = fk.flash_attn_with_kvcache(**arguments)
    got = {"out": out, "lse": lse, "k_cache": arguments["k_cache"], "v_cache": arguments["v_cache"]}
    for name, x in got.items():
        torch.testing.assert_close(x.double(), wanted[name], atol=tolerance, rtol=tolerance)


ALONE = [
    Case(), Case(new=0), Case(kv_heads=4), Case(softcap=2.0), Case(rotary=8), Case(page=16),
    Case(batch_index=True),
    Case(head_dim=5), Case(head_dim=40, value_dim=24, page=8), Case(head_dim=512, rotary=64),
    Case(head_dim=192, value_dim=128, seqlen_q=3, new=3, causal=True, splits=2),
    Case(seqlen_q=3, new=3, causal=True),
    Case(page=7, seqlen_q=2, new=9),
    Case(seqlen_q=3, new=2, causal=True), Case(seqlen_q=5, new=3, window=(4, 1)),
    Case(rotary=6, seqlen_q=3, new=2),
    Case(seqlen_q=2, new=2, window=(6, -1)),
    Case(heads=6, kv_heads=1, seqlen_q=7, new=7, causal=True),
    Case(rotary=16, interleaved=False, seqlen_q=3, new=3, causal=True),
    Case(rotary=10, interleaved=False, window=(9, 0), seqlen_q=2, new=2, leftpad=True),
    Case(alibi=True, seqlen_q=3, new=3, causal=True),
    Case(leftpad=True, seqlen_q=2, new=2, causal=True),
    Case(capacity=300, splits=3), Case(capacity=300, splits=7, window=(100, 0), page=32),
    Case(capacity=300, splits=2, seqlen_q=40, new=40, causal=True, alibi=True, softcap=3.0, page=16,
        rotary=8),
]  # fmt: skip
