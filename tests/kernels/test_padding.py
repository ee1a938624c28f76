"""unpad_input and pad_input: padded batches to packed tokens and back, with
flash_attn.bert_padding's return values."""

import pytest
import torch

import flashtrain_kernels as fk

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])


def test_what_unpad_input_returns():
    hidden = torch.arange(32.0).view(4, 4, 2)
    packed, indices, cu_seqlens, longest, used = fk.unpad_input(hidden, MASK)
    assert indices.tolist() == [0, 1, 4, 5, 6, 7, 13, 15]
    assert torch.equal(packed, hidden.view(16, 2)[indices])
    assert cu_seqlens.tolist() == [0, 2, 6, 6, 8]
    assert used.tolist() == [2, 4, 0, 2]
    assert (indices.dtype, cu_seqlens.dtype, used.dtype) == (torch.int64, torch.int32, torch.int32)
    assert type(longest) is int
    assert longest == 4


def test_unused_places_are_kept_but_not_counted_as_used():
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    for kind in (torch.int64, torch.bool):
        _, indices, cu_seqlens, longest, used = fk.unpad_input(
            torch.zeros(4, 4), MASK.to(kind), unused.to(kind)
        )
        assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 13, 15]
        assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 7, 8, 10], 4, [2, 4, 0, 2])


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3), (4, 4, 3, 2, 5)])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.int32])
def test_there_and_back_keeps_the_tokens_and_zeroes_the_padding(shape, kind):
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    packed, indices, *_ = fk.unpad_input(hidden, MASK.to(kind))
    back = fk.pad_input(packed, indices, 4, 4)
    wanted = hidden * MASK.view(4, 4, *[1] * (len(shape) - 2))
    assert torch.equal(back, wanted)
    weight = torch.randn(shape, dtype=torch.float64)
    got, expected = (torch.autograd.grad((x * weight).sum(), hidden)[0] for x in (back, wanted))
    assert torch.equal(got, expected)


def test_a_batch_of_padding_alone():
    packed, indices, cu_seqlens, longest, _ = fk.unpad_input(
        torch.randn(2, 3, 5), torch.zeros(2, 3)
    )
    assert (packed.shape, cu_seqlens.tolist(), longest) == ((0, 5), [0, 0, 0], 0)
    assert fk.pad_input(packed, indices, 2, 3).eq(0).all()


def test_attention_on_the_unpadded_tokens_is_attention_with_a_key_mask():
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 4, 2, 5, dtype=torch.float64) for _ in range(3))
    (q_, indices, cu, longest, _), (k_, *_), (v_, *_) = (fk.unpad_input(x, MASK) for x in (q, k, v))
    out = fk.pad_input(
        fk.flash_attn_varlen_func(q_, k_, v_, cu, cu, longest, longest), indices, 4, 4
    )
    bias = torch.zeros(4, 1, 1, 4, dtype=torch.float64).masked_fill(
        MASK[:, None, None] == 0, -torch.inf
    )
    wanted = fk.flash_attn_func(q, k, v, bias=bias) * MASK[..., None, None]
    torch.testing.assert_close(out, wanted)


TOKENS = torch.zeros(3, 2)
MISTAKES = [
    ("hidden_states", TypeError, lambda: fk.unpad_input([1], MASK)),
    ("hidden_states", ValueError, lambda: fk.unpad_input(torch.zeros(4), MASK)),
    ("attention_mask", ValueError, lambda: fk.unpad_input(torch.zeros(4, 5), MASK)),
    ("unused_mask", ValueError, lambda: fk.unpad_input(torch.zeros(4, 4), MASK, MASK[:2])),
    ("attention_mask", TypeError, lambda: fk.unpad_input(torch.zeros(4, 4), None)),
    ("indices", ValueError, lambda: fk.pad_input(TOKENS, torch.zeros(2).long(), 1, 4)),
    ("indices", TypeError, lambda: fk.pad_input(TOKENS, torch.zeros(3), 1, 4)),
    ("batch", TypeError, lambda: fk.pad_input(TOKENS, torch.zeros(3).long(), 1.0, 4)),
    ("seqlen", ValueError, lambda: fk.pad_input(TOKENS, torch.zeros(3).long(), 1, -4)),
]


@pytest.mark.parametrize(("named", "error", "call"), MISTAKES)
def test_a_mistake_is_named(named, error, call):
    with pytest.raises(error, match=f"^{named}"):
        call()
