"""Exact FlashAttention kernels in Triton, with flash-attn's function names, registered through torch.library.

Public: flash_attn_func, flash_attn_qkvpacked_func, documents_from_ids, Documents, explain; `reference.attention` is the
oracle in plain PyTorch, `dispatch.force` picks an implementation by hand. Importing this needs torch only: Triton is
imported by the first call on an NVIDIA GPU.
"""

from . import dispatch, reference
from .interface import explain, flash_attn_func, flash_attn_qkvpacked_func
from .masks import Documents, documents_from_ids
from .ops import FORWARD, FORWARD_PACKED

__all__ = [
    "FORWARD",
    "FORWARD_PACKED",
    "Documents",
    "dispatch",
    "documents_from_ids",
    "explain",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "reference",
]
