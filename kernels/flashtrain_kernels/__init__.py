"""Exact FlashAttention kernels in Triton, with flash-attn's function names, registered
through torch.library.

    flash_attn_func, ..._qkvpacked_func, ..._kvpacked_func  (B, S, H, D), with flash-attn 2.8's
                                                            signatures
    flash_attn_varlen_func, ..._qkvpacked_, ..._kvpacked_   sequences packed into one row, (T, H, D)
    flash_attn_with_kvcache                                 a few new tokens over a cache,
                                                            forward only
    scaled_dot_product_attention                            torch's signature, (..., H, S, D)
    merge_attention, merge_attention_into                   merge results over parts of the keys
    attention_forward, attention_backward                   forward and backward over a part
                                                            of the keys
    pad_input, unpad_input                                  convert padded batches to packed
                                                            rows and back
    masks, block_mask                                       which query sees which key, as data
    explain                                                 which implementation runs a call,
                                                            in one line
    gelu_feed_forward                                       a GELU feed-forward, GELU inside
                                                            its products
    linear_cross_entropy                                    a language model's output head and
                                                            loss, in chunks

`reference.attention` is the oracle in plain PyTorch, `dispatch.force` chooses an
implementation by hand, and `create_selective_checkpoint_contexts(FORWARDS)` of
torch.utils.checkpoint saves attention's outputs. Importing this needs torch only: Triton is
imported by the first call on an NVIDIA GPU.
"""

from . import dispatch, masks, reference
from . import transforms as _transforms  # noqa: F401 - registers autograd and vmap of the operators
from .explanation import explain
from .feed_forward import gelu_feed_forward
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .kvcache import flash_attn_with_kvcache
from .loss_head import LINEAR_CROSS_ENTROPY, linear_cross_entropy
from .masks import (
    BlockMask,
    Documents,
    Mask,
    block_mask,
    block_sparse,
    documents_from_cu_seqlens,
    documents_from_ids,
)
from .ops import FORWARD, FORWARD_KVPACKED, FORWARD_QKVPACKED, FORWARDS
from .padding import pad_input, unpad_input
from .partial import attention_backward, attention_forward, merge_attention, merge_attention_into
from .sdpa import scaled_dot_product_attention

__all__ = [
    "FORWARD",
    "FORWARDS",
    "FORWARD_KVPACKED",
    "FORWARD_QKVPACKED",
    "LINEAR_CROSS_ENTROPY",
    "BlockMask",
    "Documents",
    "Mask",
    "attention_backward",
    "attention_forward",
    "block_mask",
    "block_sparse",
    "dispatch",
    "documents_from_cu_seqlens",
    "documents_from_ids",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "gelu_feed_forward",
    "linear_cross_entropy",
    "masks",
    "merge_attention",
    "merge_attention_into",
    "pad_input",
    "reference",
    "scaled_dot_product_attention",
    "unpad_input",
]
