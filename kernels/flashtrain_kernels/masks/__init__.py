"""Masks as data: which keys each query sees, as intervals of key positions on the
device, made once a batch.

B batch, S sequence (Sq queries, Sk keys where they differ).

    documents = documents_from_ids(ids)                               # (B, S) integers
    mask = document(documents, causal=True).planned(head_dim=64, dtype=torch.bfloat16)
    out = flash_attn_func(q, k, v, mask=mask)                         # the same mask in every layer

The twelve static masks of the Long-Context Attention Benchmark (arXiv
2510.17896), for rows of S tokens:

    full                      full(S)
    causal                    causal(S)
    full document             document(documents, causal=False)
    causal document           document(documents, causal=True)
    full sliding window       sliding_window(S, (w, w))
    causal sliding window     sliding_window(S, (w, 0))
    shared question           shared_question(segments)
    global + sliding window   global_window(S, global_tokens, (w, w))
    causal blockwise          causal_blockwise(segments)
    prefix-LM causal          prefix_lm(prefix, seqlen=S)
    prefix-LM document        prefix_lm(prefix, documents=documents)
    block-causal document     block_causal(block_size, documents)

sliding_window, shared_question, global_window and causal_blockwise accept documents= too.
`varlen` makes the mask of flash-attn's cu_seqlens. No function waits for the device, and all of
them run under torch.compile.
"""

from .block_sparse import BlockMask, block_mask
from .constructors import (
    attention_tile,
    block_causal,
    causal,
    causal_blockwise,
    document,
    full,
    global_window,
    prefix_lm,
    shared_question,
    sliding_window,
    varlen,
)
from .documents import Documents, documents_from_cu_seqlens, documents_from_ids
from .mask import Mask, Sequences
from .plan import Plan
from .rows import HIGH, HIGH2, LOW, LOW2, POSITION, SEQUENCE, START

AnyMask = Mask | BlockMask | Sequences

__all__ = [
    "HIGH",
    "HIGH2",
    "LOW",
    "LOW2",
    "POSITION",
    "SEQUENCE",
    "START",
    "BlockMask",
    "Documents",
    "Mask",
    "Plan",
    "Sequences",
    "attention_tile",
    "block_causal",
    "block_mask",
    "causal",
    "causal_blockwise",
    "document",
    "documents_from_cu_seqlens",
    "documents_from_ids",
    "full",
    "global_window",
    "prefix_lm",
    "shared_question",
    "sliding_window",
    "varlen",
]
