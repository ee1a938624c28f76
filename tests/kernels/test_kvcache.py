"""flash_attn_with_kvcache and keys in pages: on a CPU by plain PyTorch, and
what is said of mistakes."""

import pytest
import torch
from kvcache_cases import ALONE, Case, assert_equals_the_formula, expected
from plain_formula import cumulative

import flashtrain_kernels as fk


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_every_feature_equals_the_formula_and_the_cache_is_written(case):
    assert_equals_the_formula(case, torch.float64, 1e-7)


def test_one_token_after_another_is_attention_over_them_all():
    q, k, v = (torch.randn(2, 9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = fk.flash_attn_func(q, k, v, causal=True, window_size=(4, 0))
    caches = torch.zeros(2, 12, 2, 8).double(), torch.zeros(2, 12, 2, 8).double()
    for i in range(9):
        one = slice(i, i + 1)
        out = fk.flash_attn_with_kvcache(
            q[:, one],
            *caches,
            k[:, one],
            v[:, one],
            cache_seqlens=i,
            causal=True,
            window_size=[4, 0],
        )
        torch.testing.assert_close(out, whole[:, one])


def test_a_cache_that_is_full_needs_no_length_and_sinks_join():
    q, cache = torch.randn(2, 3, 4, 8).double(), torch.randn(2, 6, 2, 8).double()
    sink = torch.randn(4).double()
    got = fk.flash_attn_with_kvcache(
        q, cache, cache, causal=True, learnable_sink=sink, return_softmax_lse=True
    )
    wanted = fk.flash_attn_func(q, cache, cache, causal=True, learnable_sink=sink, return_lse=True)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_under_torch_compile_with_lengths_that_change():
    case = Case(seqlen_q=2, new=2, causal=True, rotary=8)
    compiled = torch.compile(fk.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        arguments = case.arguments(torch.float64, seed)
        wanted = expected(case, arguments)
        out, _ = compiled(**arguments)
        torch.testing.assert_close(out, wanted["out"])
        torch.testing.assert_close(arguments["k_cache"], wanted["k_cache"])


Q, CACHE, NEW = torch.zeros(2, 1, 4, 8), torch.zeros(2, 6, 2, 8), torch.zeros(2, 1, 2, 8)
TABLE = torch.zeros(2, 3, dtype=torch.int32)
TURNED = CACHE.transpose(2, 3).contiguous().transpose(2, 3)
ANGLES = torch.ones(6, 4)
MISTAKES = [
    ("q", {"q": Q[0]}, ValueError),
    ("k_cache", {"k_cache": CACHE[0]}, ValueError),
    ("k_cache and v_cache", {"v_cache": CACHE[:, :5]}, ValueError),
    ("k_cache", {"k_cache": CACHE.half()}, TypeError),
    ("v_cache", {"v_cache": TURNED}, ValueError),
    ("k_cache", {"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, ValueError),
    ("q's heads", {"q": Q[:, :, :3]}, ValueError),
    ("k and v", {"k": NEW}, ValueError),
    ("cache_seqlens", {"k": NEW, "v": NEW}, ValueError),
    ("k", {"k": NEW[:1], "v": NEW, "cache_seqlens": 1}, ValueError),
    ("cache_seqlens", {"k": NEW, "v": NEW, "cache_seqlens": 6}, ValueError),
    ("cache_seqlens", {"cache_seqlens": torch.tensor([7, 1])}, ValueError),
    ("cache_seqlens", {"cache_seqlens": torch.tensor([-1, 1])}, ValueError),
    ("cache_seqlens", {"cache_seqlens": torch.ones(3).int()}, ValueError),
    ("cache_seqlens", {"cache_seqlens": torch.ones(2)}, TypeError),
    ("cache_seqlens", {"cache_seqlens": 1.5}, TypeError),
    ("cache_batch_idx", {"cache_batch_idx": torch.tensor([0, 2])}, ValueError),
    (
        "cache_batch_idx",
        {"block_table": TABLE, "cache_batch_idx": torch.tensor([0, 1])},
        ValueError,
    ),
    ("block_table", {"block_table": TABLE.long()}, TypeError),
    ("block_table", {"block_table": TABLE[:1]}, ValueError),
    ("cache_seqlens", {"block_table": TABLE, "cache_seqlens": 19}, ValueError),
    ("rotary_cos", {"rotary_cos": ANGLES}, ValueError),
    ("rotary_cos", {"rotary_cos": ANGLES, "rotary_sin": ANGLES}, ValueError),
    ("causal", {"causal": 1}, TypeError),
    ("num_splits", {"num_splits": 129}, ValueError),
    ("num_splits", {"num_splits": -1}, ValueError),
    ("learnable_sink", {"learnable_sink": torch.zeros(3)}, ValueError),
]


@pytest.mark.parametrize(("named", "changes", "error"), MISTAKES)
def test_a_mistake_is_named(named, changes, error):
    with pytest.raises(error, match=f"^{named}"):
        fk.flash_attn_with_kvcache(**{"q": Q, "k_cache": CACHE, "v_cache": CACHE, **changes})


@pytest.mark.parametrize("columns", [3, 5])
def test_rotary_tables_too_short_or_too_wide_are_named(columns):
    angle = torch.ones(5 if columns == 3 else 6, columns)
    with pytest.raises(ValueError, match="rotary_cos"):
        fk.flash_attn_with_kvcache(Q, CACHE, CACHE, NEW, NEW, angle, angle, cache_seqlens=1)


# --- packed sequences whose keys lie in pages -----------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (2, 1), "alibi": True}], ids=str
)
def test_packed_sequences_over_pages_equal_those_over_rows_gradients_too(options):
    options = dict(options)
    lengths_q, lengths_k, size = [3, 0, 5], [7, 4, 5], 4
    cu_q, cu_k = map(cumulative, (lengths_q, lengths_k))
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(3, 4)
    # 0 holds all of the second sequence.
    table = torch.tensor([[5, 2], [0, -1], [1, 3]], dtype=torch.int32)
    q = torch.randn(8, 4, 8, dtype=torch.float64, requires_grad=True)
    pages = torch.randn(2, 6, size, 2, 8, dtype=torch.float64, requires_grad=True)
    rows = [
        pages[:, table[n].long()].flatten(1, 2)[:, :length] for n, length in enumerate(lengths_k)
    ]
    k, v = torch.cat(rows, 1)
    wanted = fk.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, **options, return_lse=True)
    got = fk.flash_attn_varlen_func(
        q, *pages, cu_q, cu_k, 5, 7, **options, block_table=table, return_lse=True
    )
    weight = torch.randn_like(wanted[0])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    of_wanted = torch.autograd.grad((wanted[0] * weight).sum(), (q, pages))
    for one, other in zip(
        torch.autograd.grad((got[0] * weight).sum(), (q, pages)), of_wanted, strict=True
    ):
        torch.testing.assert_close(one, other)
