"""Masks as data: document boundaries, the dense mask, the number of visible pairs."""

import pytest
import torch

from flashtrain_kernels import documents_from_ids
from flashtrain_kernels.masks import visible, visible_pairs


def test_documents_hold_the_first_and_one_past_the_last_index_of_each_tokens_document():
    documents = documents_from_ids(torch.tensor([[0, 0, 1, 1, 1, 4], [2, 2, 2, 2, 2, 2]], dtype=torch.int32))
    assert documents.start.tolist() == [[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0]]
    assert documents.end.tolist() == [[2, 2, 5, 5, 5, 6], [6, 6, 6, 6, 6, 6]]
    assert documents.start.dtype == documents.end.dtype == torch.int32


def test_ids_that_are_no_integer_matrix_are_refused():
    with pytest.raises(TypeError, match=r"ids must be an integer tensor \(B, S\), not torch.float32"):
        documents_from_ids(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="not list"):
        documents_from_ids([[0, 1]])
    with pytest.raises(ValueError, match=r"not the shape \(3,\)"):
        documents_from_ids(torch.zeros(3, dtype=torch.int64))


def test_causal_is_aligned_bottom_right():
    mask = visible(2, 4, causal=True, documents=None, device="cpu")
    assert mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    mask = visible(3, 1, causal=True, documents=None, device="cpu")
    assert mask.int().tolist() == [[0], [0], [1]]


def test_documents_and_causal_together():
    documents = documents_from_ids(torch.tensor([[0, 0, 1]]))
    both = visible(3, 3, causal=True, documents=documents, device="cpu")
    assert both.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 5), (3, 7), (7, 3), (4, 1), (1, 4)])
def test_visible_pairs_counts_the_mask(seqlen_q, seqlen_k):
    mask = visible(seqlen_q, seqlen_k, causal=True, documents=None, device="cpu")
    assert visible_pairs(seqlen_q, seqlen_k, causal=True) == mask.sum()
    assert visible_pairs(seqlen_q, seqlen_k, causal=False) == seqlen_q * seqlen_k
