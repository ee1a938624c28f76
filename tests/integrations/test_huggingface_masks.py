"""Our mask function for transformers: the same pairs as transformers' own, without the
matrix where that can be."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils as theirs

from flashtrain.integrations.huggingface_mask_rules import read
from flashtrain.integrations.huggingface_masks import AttentionMask, attention_mask, dense_bias

B, SQ = 3, 13
PACKED = torch.tensor([[0] * 5 + [1] + [2] * 7, [0] * 13, [0] * 12 + [1]])
POSITIONS = torch.stack(
    [torch.cat([torch.arange(int((row == n).sum())) for n in row.unique()]) for row in PACKED]
)
LEFT_PADDING = torch.tensor([0, 4, 9])


def packed(function):
    if hasattr(theirs, "packed_sequence_compatibility_function"):
        return theirs.packed_sequence_compatibility_function(function, POSITIONS, PACKED)
    # As before transformers 5.2x.
    return theirs.and_masks(theirs.packed_sequence_mask_function(PACKED), function)


FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "both ways": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(4),
    "window both ways": theirs.sliding_window_bidirectional_mask_function(4),
    "chunks": theirs.chunked_causal_mask_function(5, LEFT_PADDING),
    "packed causal": packed(theirs.causal_mask_function),
    "packed window": packed(theirs.sliding_window_causal_mask_function(4)),
    "packed chunks": packed(
        theirs.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.long))
    ),
}
PADDINGS = {
    "none": None,
    "ones": torch.ones(B, SQ, dtype=torch.bool),
    "right": torch.arange(SQ) < torch.tensor([13, 5, 1])[:, None],
    "left": torch.arange(SQ) >= torch.tensor([0, 4, 9])[:, None],
    "between": torch.arange(SQ)[None].expand(B, -1) % 3 > 0,
    "all": torch.zeros(B, SQ, dtype=torch.bool),
}


def ours(function, padding=None, q_length=SQ, kv_length=SQ, q_offset=0, kv_offset=0, **more):
    return attention_mask(
        batch_size=B,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=padding,
        **more,
    )


def dense(found: AttentionMask | None, causal: bool, q_length=SQ, kv_length=SQ):
    """(B, Sq, Sk) bool: the pairs that a mask of ours lets see each other."""
    query = torch.arange(q_length)[:, None] + kv_length - q_length
    key = torch.arange(kv_length)[None]
    if found is None:
        visible = (
            (key <= query) | (q_length == 1)
            if causal
            else torch.ones(q_length, kv_length, dtype=torch.bool)
        )
        return visible.expand(B, -1, -1)
    assert found.bias is None
    if found.mask is not None:
        assert (found.causal, found.window_size) == (False, (-1, -1))
        return found.mask.dense()
    left, right = found.window_size[0], 0 if found.causal else found.window_size[1]
    visible = (left < 0) | (key >= query - left)
    visible = visible & ((right < 0) | (key <= query + right))
    return visible.expand(B, q_length, kv_length)


def expected(function, padding=None, q_length=SQ, kv_length=SQ, q_offset=0, kv_offset=0):
    mask = theirs.sdpa_mask(
        B,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        function,
        padding,
        allow_is_causal_skip=False,
        device="cpu",
    )
    return mask[:, 0]


# transformers packs without padding only.
@pytest.mark.parametrize(
    ("name", "padding"),
    [
        (name, side)
        for name in FUNCTIONS
        for side in PADDINGS
        if "packed" not in name or side == "none"
    ],
)
def test_the_pairs_are_those_of_transformers(name, padding):
    function, given = FUNCTIONS[name], PADDINGS[padding]
    found = dense(ours(function, given), causal=name == "causal")
    assert torch.equal(found, expected(function, given))


@pytest.mark.parametrize("padding", ["none", "ones", "left", "between"])
@pytest.mark.parametrize("name", ["causal", "both ways", "window", "chunks"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [
        (1, 13, 12, 0),  # a new token behind a cache
        (4, 13, 9, 0),  # several
        (1, 4, 12, 9),  # behind a cache that keeps a window
        (3, 6, 10, 7),
        (5, 20, 0, 0),  # the prompt in an empty static cache
        (1, 20, 12, 0),  # a new token in a static cache
        (1, 20, torch.tensor(12), 0),
        (5, 20, torch.tensor([0])[0], 0),
    ],
)
def test_caches_are_counted_in_where_the_queries_stand(
    name, padding, q_length, kv_length, q_offset, kv_offset
):
    function, given = FUNCTIONS[name], PADDINGS[padding]
    sizes = {
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
    }
    causal = name != "both ways"
    for allowed in (True, False):
        found = ours(function, given, **sizes, allow_is_causal_skip=allowed)
        assert torch.equal(
            dense(found, causal, q_length, kv_length), expected(function, given, **sizes)
        )


def test_plain_masks_need_no_tensor():
    assert ours(FUNCTIONS["causal"]) is None
    assert ours(FUNCTIONS["causal"], PADDINGS["ones"]) is None
    assert ours(FUNCTIONS["window"]) == AttentionMask(B, SQ, SQ, causal=True, window_size=(3, 0))
    assert ours(FUNCTIONS["window both ways"]) == AttentionMask(B, SQ, SQ, window_size=(4, 4))
    assert ours(theirs.sliding_window_causal_mask_function(SQ)) is None
    both = ours(
        FUNCTIONS["both ways"], allow_is_causal_skip=False, allow_is_bidirectional_skip=True
    )
    assert both == AttentionMask(B, SQ, SQ)


def test_what_is_not_made_of_known_parts_is_a_dense_bias():
    prefix = theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k < 4)
    blocks = theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(PACKED))
    for function, by_vmap in ((prefix, True), (blocks, False)):
        assert read(function) is None
        found = ours(function, PADDINGS["left"], use_vmap=by_vmap, dtype=torch.float64)
        assert found.bias.dtype == torch.float64
        assert torch.equal(found.bias[:, 0] == 0, expected(function, PADDINGS["left"]))
        assert torch.equal(found.bias[:, 0] == float("-inf"), ~expected(function, PADDINGS["left"]))


def test_a_mask_made_before_comes_back_as_it_is():
    made = ours(FUNCTIONS["causal"], PADDINGS["left"])
    assert ours(FUNCTIONS["causal"], made) is made
    assert (made.ndim, made.shape, made.contiguous()) == (4, (B, 1, SQ, SQ), made)


def test_the_lowest_number_of_a_dtype_hides():
    lowest = torch.finfo(torch.bfloat16).min
    mask = torch.tensor([[[[0.0, -1.5, lowest, float("-inf")]]]], dtype=torch.bfloat16)
    assert dense_bias(mask, torch.float32).flatten().tolist() == [
        0.0,
        -1.5,
        float("-inf"),
        float("-inf"),
    ]
    visible = torch.tensor([[[[True, False]]]])
    assert dense_bias(visible, torch.float32).flatten().tolist() == [0.0, float("-inf")]
