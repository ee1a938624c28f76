"""transformers' own flash-attention path, with our functions where flash-attn's would be,
takes what it passes them.

Against the reference on the same tensors: padded and packed rows, a paged cache.
"""

import pytest
import torch

import flashtrain_kernels as fk

flash = pytest.importorskip("transformers.modeling_flash_attention_utils")
B, S, H, K, D = 2, 12, 4, 2, 8


@pytest.fixture
def forward(monkeypatch):
    """_flash_attention_forward on tensors (B, S, heads, D), causal, with
    flash-attn's names filled by ours."""
    functions = fk.flash_attn_func, fk.flash_attn_varlen_func, fk.flash_attn_with_kvcache
    monkeypatch.setattr(
        flash, "_lazy_imports", lambda *_, **__: (*functions, flash._pad_input, flash._unpad_input)
    )
    for name in (
        "_loaded_implementation",
        "_flash_fn",
        "_flash_varlen_fn",
        "_flash_with_kvcache_fn",
    ):
        monkeypatch.setattr(flash, name, None)
    for name in (
        "_pad_fn",
        "_unpad_fn",
        "_process_flash_kwargs_fn",
        "_process_with_kvcache_kwargs_fn",
    ):
        monkeypatch.setattr(flash, name, None)

    def call(q, k, v, mask=None, **options):
        return flash._flash_attention_forward(
            q,
            k,
            v,
            mask,
            query_length=q.shape[1],
            is_causal=True,
            attn_implementation="ours",
            **options,
        )

    return call


def tensors(batch):
    return [torch.randn(batch, S, heads, D, dtype=torch.float64) for heads in (H, K, K)]


def test_a_padded_batch(forward):
    inputs = tensors(B)
    real = torch.ones(B, S, dtype=torch.bool)
    real[0, 7:] = False
    got = forward(*inputs, real.long(), sliding_window=5, s_aux=torch.arange(4.0))
    wanted = fk.reference.attention(
        *inputs, causal=True, window_size=(4, 4), learnable_sink=torch.arange(4.0)
    )
    torch.testing.assert_close(got[real], wanted[real])


def test_a_token_of_each_sequence_over_pages(forward):
    lengths, size = torch.tensor([5, 9]), 4
    q, k, v = (torch.randn(1, 2, heads, D, dtype=torch.float64) for heads in (H, K, K))
    caches = [torch.randn(6, size, K, D, dtype=torch.float64) for _ in range(2)]
    table = torch.tensor([[4, 0, -1], [1, 5, 3]], dtype=torch.int32)
    before = [cache.clone() for cache in caches]
    cu = torch.tensor([0, 6, 16], dtype=torch.int32)  # with the new tokens
    got = forward(
        q, k, v, block_table=table, k_cache=caches[0], v_cache=caches[1],
        cu_seq_lens_q=torch.arange(3).int(),
        cu_seq_lens_k=cu, max_length_q=1, max_length_k=10, s_aux=torch.ones(H),
    )  # fmt: skip
    for n, length in enumerate(lengths.tolist()):
        old = [cache[table[n].clamp(min=0).long()].flatten(0, 1)[:length] for cache in before]
        keys, values = (
            torch.cat((rows, new[0, n : n + 1])) for rows, new in zip(old, (k, v), strict=True)
        )
        one = fk.reference.attention(
            q[:, n : n + 1], keys[None], values[None], learnable_sink=torch.ones(H)
        )
        torch.testing.assert_close(got[:, n : n + 1], one)
