"""flash_attn_with_kvcache by its kernels, in Triton's interpreter, in a process of its
own (test_portable.py)."""

import pytest
import torch
from kvcache_cases import ALONE, Case, assert_equals_the_formula, expected

import flashtrain_kernels as fk


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_the_kernels_equal_the_formula_and_write_the_cache(case):
    assert_equals_the_formula(case, torch.float32, 2e-5)


def test_float16_is_near_the_formula():
    case = Case(
        seqlen_q=2, new=2, capacity=200, head_dim=64, rotary=32, causal=True, page=16, splits=2
    )
    assert_equals_the_formula(case, torch.float16, 4e-3)


def test_rows_past_the_keys_may_hold_anything_and_a_table_past_the_pages_reads_none_elsewhere():
    case = Case(capacity=48, page=16, batch=2)
    arguments = case.arguments(torch.float32)
    arguments["cache_seqlens"] = torch.tensor([3, 17], dtype=torch.int32)
    wanted = expected(case, arguments)
    used = set(arguments["block_table"][0, :1].tolist() + arguments["block_table"][1, :2].tolist())
    for page in set(range(arguments["k_cache"].shape[0])) - used:
        arguments["k_cache"][page] = arguments["v_cache"][page] = torch.nan
    arguments["v_cache"][arguments["block_table"][0, 0], 5:] = torch.nan
    arguments["block_table"][0, 1:] = torch.tensor([-1, 99_999], dtype=torch.int32)
    out, _ = fk.flash_attn_with_kvcache(**arguments)
    torch.testing.assert_close(out.double(), wanted["out"], atol=2e-5, rtol=2e-5)


def test_a_masked_value_that_is_not_finite_reaches_the_queries_that_see_it_alone():
    case = Case(seqlen_q=4, new=4, causal=True, batch=1)
    arguments = case.arguments(torch.float32)
    wanted = expected(case, arguments)["out"]
    arguments["v"][0, 2] = torch.inf
    out, _ = fk.flash_attn_with_kvcache(**arguments)
    torch.testing.assert_close(out[:, :2].double(), wanted[:, :2], atol=2e-5, rtol=2e-5)
    assert not out[:, 2:].isfinite().any()


def test_any_strides_and_rows_that_do_not_fit():
    case = Case(seqlen_q=2, new=2, causal=True, rotary=8)
    arguments = case.arguments(torch.float32)
    wanted = expected(case, arguments)
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].transpose(1, 3).contiguous().transpose(1, 3)
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = fk.flash_attn_with_kvcache(**arguments)
    torch.testing.assert_close(out.double(), wanted["out"], atol=2e-5, rtol=2e-5)
    # As on a GPU, where lengths are not read: what lies past the cache is neither written nor read.
    before = arguments["k_cache"].clone()
    lengths = torch.full((case.batch,), case.capacity - 1, dtype=torch.int32)
    table = torch.arange(case.batch, dtype=torch.int32)[:, None]
    caches = arguments["k_cache"], arguments["v_cache"]
    torch.ops.flashtrain_kernels.append_to_cache(
        arguments["k"], arguments["v"], *caches, lengths, table, False, None, None, True
    )
    torch.testing.assert_close(arguments["k_cache"][:, -1], arguments["k"][:, 0])
    torch.testing.assert_close(arguments["k_cache"][:, :-1], before[:, :-1])


def test_empty_batches_queries_and_caches():
    q, cache = torch.zeros(2, 1, 2, 16), torch.zeros(2, 0, 2, 16)
    out, lse = fk.flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    for batch, seqlen_q in ((0, 1), (2, 0)):
        q, cache = torch.zeros(batch, seqlen_q, 2, 16), torch.zeros(batch, 8, 2, 16)
        assert fk.flash_attn_with_kvcache(q, cache, cache).shape == q.shape
