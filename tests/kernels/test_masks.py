"""Masks as data: each mask against its rule pair by pair, parts of masks, packed
sequences, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import DOCUMENT_MASKS, EXAMPLE, TWELVE, the_twelve, within_documents
from plain_formula import assert_one_graph_serves, cumulative, sequence_pairs

from flashtrain_kernels import documents_from_ids, masks
from flashtrain_kernels.masks import HIGH, LOW, POSITION, SEQUENCE, START


@st.composite
def batches(draw):
    """One row of documents of segments, at most a few dozen tokens."""
    lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    return [draw(st.lists(lengths, min_size=1, max_size=4))]


@pytest.mark.parametrize("name", TWELVE)
def test_each_of_the_twelve_masks_equals_its_rule(name):
    case = the_twelve(EXAMPLE)[name]
    assert case.mask.queries.dtype == torch.int32
    assert case.mask.queries.is_contiguous()
    assert torch.equal(case.mask.dense(), case.dense())


@settings(max_examples=25)
@given(
    batch=batches(),
    left=st.integers(-1, 12),
    right=st.integers(-1, 12),
    global_tokens=st.integers(0, 30),
)
def test_masks_equal_their_rules_at_any_lengths(batch, left, right, global_tokens):
    # A bound of -1 is none; the rule's is one that no row reaches.
    rules = (left if left >= 0 else 1000, right if right >= 0 else 1000)
    made = within_documents(batch, left, right, global_tokens)
    wanted = within_documents(batch, *rules, global_tokens)
    for name, case in made.items():
        assert torch.equal(case.mask.dense(), wanted[name].dense()), name


@given(frames=st.integers(0, 7), size=st.integers(1, 9), references=st.integers(0, 9))
def test_attention_tile_is_a_videos_own_frame_and_reference_frames_which_see_all(
    frames, size, references
):
    """Efficient-vDiT, arXiv 2502.06155: tiles of the diagonal, rows and columns of references; the
    visible pairs grow linearly with the frames."""
    seen = masks.attention_tile(frames, size, references).dense()[0]
    frame = torch.arange(frames * size) // size
    query, key = frame[:, None], frame[None]
    assert torch.equal(seen, (query == key) | (query < references) | (key < references))
    r = min(references, frames)
    assert seen.sum() == size**2 * (r * frames + (frames - r) * (r + 1))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (5, 5), (3, 7), (7, 3), (4, 1), (1, 4), (0, 3), (3, 0)]
)
def test_causal_is_aligned_bottom_right(seqlen_q, seqlen_k):
    mask = masks.causal(seqlen_q, seqlen_k)
    wanted = [[[j <= i + seqlen_k - seqlen_q for j in range(seqlen_k)] for i in range(seqlen_q)]]
    assert mask.dense().tolist() == wanted
    assert mask.queries[POSITION].tolist() == [[i + seqlen_k - seqlen_q for i in range(seqlen_q)]]
    assert masks.full(seqlen_q, seqlen_k).dense().all()


def test_rows_number_the_documents_over_the_batch_and_say_where_each_begins():
    mask = masks.document(torch.tensor([[4, 4, 9, 9, 9], [1, 2, 2, 1, 1]]), causal=True)
    assert mask.queries[SEQUENCE].tolist() == [[0, 0, 1, 1, 1], [2, 3, 3, 4, 4]]
    assert mask.queries[START].tolist() == [[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]]
    assert mask.queries[POSITION].tolist() == [[0, 1, 2, 3, 4]] * 2
    one_a_row = masks.prefix_lm(torch.tensor([2, 0]), seqlen=3)
    assert one_a_row.queries[SEQUENCE].tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("name", DOCUMENT_MASKS)
def test_a_selection_of_queries_and_keys_is_the_dense_mask_indexed(name):
    mask = within_documents(EXAMPLE)[name].mask
    generator = torch.Generator().manual_seed(1)
    queries, keys = (
        torch.randperm(23, generator=generator)[:10],
        torch.randperm(23, generator=generator)[:17],
    )
    part = mask.select(queries, keys)
    assert part.seqlen_k == 17
    assert torch.equal(part.dense(), mask.dense()[:, queries][:, :, keys])
    again = part.select(torch.arange(0, 10, 3), torch.arange(5))
    assert torch.equal(again.dense(), part.dense()[:, ::3, :5])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    causal=st.booleans(), left=st.integers(-1, 5), right=st.integers(-1, 5), tail=st.integers(0, 3),
)  # fmt: skip
def test_varlen_equals_its_rule_and_tokens_past_the_last_boundary_see_nothing(
    lengths, causal, left, right, tail
):
    lengths_q, lengths_k = (list(side) for side in zip(*lengths, strict=True))
    total_q, total_k = sum(lengths_q) + tail, sum(lengths_k) + tail
    mask = masks.varlen(
        cumulative(lengths_q),
        cumulative(lengths_k),
        total_q,
        total_k,
        causal=causal,
        window=(left, right),
    )
    wanted = torch.zeros(1, total_q, total_k, dtype=torch.bool)
    wanted[0, : sum(lengths_q), : sum(lengths_k)] = sequence_pairs(lengths, left, right, causal)
    assert torch.equal(mask.dense(), wanted)


def test_varlen_numbers_the_sequences_and_measures_positions_within_them():
    mask = masks.varlen(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 6]), 5, 6)
    assert mask.queries[SEQUENCE].tolist() == [[0, 0, 2, 2, 2]]
    assert mask.queries[START].tolist() == [[0, 0, 4, 4, 4]]
    assert mask.queries[POSITION].tolist() == [[1, 2, 3, 4, 5]]


@settings(max_examples=40)
@given(bounds=st.lists(st.integers(-50, 50), min_size=2, max_size=6), total=st.integers(0, 12))
def test_no_content_of_cu_seqlens_points_outside(bounds, total):
    cu_seqlens = torch.tensor(bounds)
    rows = masks.varlen(cu_seqlens, cu_seqlens.flip(0), total, total, causal=True).queries
    for row in (LOW, HIGH, START):
        assert ((rows[row] >= -total) & (rows[row] <= total)).all()
    start, end = masks.documents_from_cu_seqlens(cu_seqlens, total)
    assert ((start >= 0) & (start <= total) & (end >= 0) & (end <= total)).all()


def test_documents_hold_the_first_and_one_past_the_last_index_of_each_tokens_document():
    documents = documents_from_ids(
        torch.tensor([[0, 0, 1, 1, 1, 4], [2, 2, 2, 2, 2, 2]], dtype=torch.int32)
    )
    assert documents.start.tolist() == [[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0]]
    assert documents.end.tolist() == [[2, 2, 5, 5, 5, 6], [6, 6, 6, 6, 6, 6]]
    assert documents.start.dtype == documents.end.dtype == torch.int32
    # A number that comes again is another document.
    again = documents_from_ids(torch.tensor([[3, 3, 1, 3, 3]]))
    assert (again.start.tolist(), again.end.tolist()) == ([[0, 0, 2, 3, 3]], [[2, 2, 3, 5, 5]])


def test_documents_from_cumulative_lengths_are_those_from_ids():
    lengths = [3, 0, 4, 1]
    documents = masks.documents_from_cu_seqlens(cumulative(lengths), 10)
    wanted = documents_from_ids(torch.tensor([[0, 0, 0, 2, 2, 2, 2, 3]]))
    assert documents.start[:, :8].tolist() == wanted.start.tolist()
    assert documents.end[:, :8].tolist() == wanted.end.tolist()
    assert not masks.document(documents, causal=False).dense()[:, 8:].any()


@pytest.mark.parametrize("name", DOCUMENT_MASKS)
def test_tokens_of_no_document_see_nothing_and_are_not_seen(name):
    documents = masks.documents_from_cu_seqlens(cumulative([9, 14]), 30)
    seen = within_documents([[[4, 5], [3, 11], [7]]], documents=documents)[name].mask.dense()
    assert not seen[:, 23:].any()
    assert not seen[:, :, 23:].any()
    assert seen[:, :23].any(2).all()


def test_huge_windows_and_blocks_are_no_bound():
    assert masks.sliding_window(5, (2**40, 2**40)).dense().all()
    assert masks.block_causal(2**40, torch.zeros(1, 5, dtype=torch.int64)).dense().all()
    assert masks.prefix_lm(torch.tensor([2**40]), seqlen=5).dense().all()
    assert masks.global_window(5, 2**40, (0, 0)).dense().all()


IDS = torch.zeros(2, 4, dtype=torch.int64)
MISTAKES = [
    ("ids", TypeError, lambda: documents_from_ids(torch.zeros(2, 3))),
    ("ids", TypeError, lambda: documents_from_ids([[0, 1]])),
    ("ids", ValueError, lambda: documents_from_ids(torch.zeros(3, dtype=torch.int64))),
    ("seqlen_q", ValueError, lambda: masks.full(-1)),
    ("seqlen_q", TypeError, lambda: masks.causal(2.5)),
    ("window", ValueError, lambda: masks.sliding_window(4, (-2, 0))),
    ("window", TypeError, lambda: masks.sliding_window(4, 3)),
    ("documents", ValueError, lambda: masks.sliding_window(5, (1, 1), documents=IDS)),
    ("documents", TypeError, lambda: masks.document("ids", causal=True)),
    ("documents", ValueError, lambda: masks.document(IDS[0], causal=True)),
    ("documents.start", TypeError, lambda: masks.document(masks.Documents(IDS, IDS), causal=True)),
    ("documents.end", ValueError,
     lambda: masks.document(masks.Documents(IDS.int(), IDS.int()[:, :2]), causal=True)),
    ("segments and documents", ValueError, lambda: masks.shared_question(IDS, documents=IDS[:1])),
    ("prefix", TypeError, lambda: masks.prefix_lm(torch.zeros(2, 4), documents=IDS)),
    ("prefix", ValueError, lambda: masks.prefix_lm(IDS[:, 0], documents=IDS)),
    ("seqlen", ValueError, lambda: masks.prefix_lm(IDS[:, 0])),
    ("prefix", ValueError, lambda: masks.prefix_lm(IDS, seqlen=5)),
    ("block_size", ValueError, lambda: masks.block_causal(0, IDS)),
    ("block_size", TypeError, lambda: masks.block_causal(2.0, IDS)),
    ("global_tokens", ValueError, lambda: masks.global_window(4, -1, (1, 1))),
    ("cu_seqlens_q", ValueError, lambda: masks.varlen(IDS, IDS, 4, 4)),
    ("cu_seqlens_q and", ValueError, lambda: masks.varlen(IDS[0], IDS[0][:3], 4, 4)),
    ("cu_seqlens_q", TypeError, lambda: masks.varlen(IDS[0].float(), IDS[0], 4, 4)),
    ("cu_seqlens_k", TypeError, lambda: masks.varlen(IDS[0], [0, 1], 4, 4)),
    ("total", ValueError, lambda: masks.documents_from_cu_seqlens(IDS[0], -4)),
    ("queries", TypeError, lambda: masks.full(4).select([0], IDS[0])),
    ("keys", TypeError, lambda: masks.full(4).select(IDS[0], IDS[0].bool())),
    ("keys", ValueError, lambda: masks.full(4).select(IDS[0], IDS)),
]  # fmt: skip


@pytest.mark.parametrize(("named", "error", "call"), MISTAKES)
def test_a_mistake_is_refused_by_the_arguments_name(named, error, call):
    with pytest.raises(error, match=f"^{named}"):
        call()


def test_masks_compile_into_one_graph_that_serves_other_lengths():
    def rows(ids):
        length = ids.shape[1]
        made = [
            masks.causal(length), masks.document(ids, causal=True),
            masks.sliding_window(length, (3, 0), documents=ids),
            masks.shared_question(ids), masks.global_window(length, 3, (2, 2)),
            masks.causal_blockwise(ids), masks.attention_tile(length, 3, 2),
            masks.prefix_lm(ids, documents=ids), masks.block_causal(4, ids),
            masks.varlen(ids[0, :3], ids[0, :3], length, length, causal=True, window=(3, 3)),
        ]  # fmt: skip
        return [mask.queries for mask in (*made, made[1].select(ids[0], ids[0]))]

    assert_one_graph_serves(
        rows, [(torch.arange(length)[None].expand(2, -1) // 9,) for length in (40, 23, 61)]
    )
