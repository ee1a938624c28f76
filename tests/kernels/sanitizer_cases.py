"""One launch of each kernel for each way a mask can come, at small odd sizes, for
NVIDIA's memory checker:

    compute-sanitizer --tool memcheck python tests/kernels/sanitizer_cases.py cuda hopper

(or portable: the kernels that calls are forced through). Every tensor is an allocation of its own,
so that a read or write past any of them is seen. `python sanitizer_cases.py cpu` with
TRITON_INTERPRET=1 only shows that the cases run.
"""

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch first allocates

import torch
from attention_cases import Case, ours

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch

CASES = [
    Case(2, 37, 45, 4, 2, 64, "causal"), Case(1, 45, 37, 1, 1, 64, "window"),
    Case(1, 1, 131, 2, 2, 64),
    Case(1, 67, 67, 1, 1, 40, "causal"), Case(1, 131, 197, 2, 1, 128, "causal"),
    Case(1, 67, 67, 2, 2, 128, "document"),
    Case(1, 131, 197, 2, 1, 256, "causal"), Case(1, 67, 45, 1, 1, 256),
    Case(1, 20, 10, 1, 1, 256, "causal"),
    Case(2, 131, 131, 2, 2, 64, "causal document"), Case(1, 131, 131, 2, 2, 64, "global window"),
    Case(1, 67, 67, 1, 1, 64, "shuffled"), Case(1, 67, 99, 2, 2, 64, "blocks causal"),
    Case(1, 37, 45, 2, 1, 64, "causal", 3.0, "alibi_rows", (0, 0, 0, 0), 0.3),
    Case(1, 37, 53, 2, 1, 64, "causal", dropout=0.3),
    Case(1, 131, 131, 2, 1, 128, "window", dropout=0.3),
    Case(1, 37, 45, 2, 1, 64, "causal", 3.0), Case(1, 67, 67, 2, 2, 72, "causal document", 3.0),
    Case(1, 67, 45, 1, 1, 136, "causal"), Case(1, 67, 99, 2, 1, 128, "causal", alibi="alibi_rows"),
    Case(2, 37, 45, 2, 2, 64, "causal", sinks=True),
    Case(2, 37, 45, 2, 2, 64, "causal", bias=(1, 0, 1, 0)),
    Case(2, 37, 45, 2, 2, 64, "causal", bias=(0, 1, 0, 1)),
]  # fmt: skip


def packed(device: str, dtype: torch.dtype) -> None:
    """Sequences of other lengths of queries and keys, empty ones among them, and tokens past the
    last; and with one cu_seqlens for both."""
    cu_q, cu_k = (
        torch.tensor(x, device=device, dtype=torch.int32) for x in ([0, 7, 7, 61], [0, 9, 20, 41])
    )
    q = torch.randn(65, 2, 64, device=device, dtype=dtype, requires_grad=True)
    kv = torch.randn(43, 2, 2, 64, device=device, dtype=dtype, requires_grad=True)
    out = fk.flash_attn_varlen_kvpacked_func(
        q, kv, cu_q, cu_k, 54, 21, 0.3, causal=True, dropout_seed=5
    )
    torch.autograd.grad(out.float().sum(), (q, kv))
    qkv = torch.randn(65, 3, 2, 64, device=device, dtype=dtype, requires_grad=True)
    out = fk.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 54, 0.3, causal=True, dropout_seed=5)
    torch.autograd.grad(out.float().sum(), qkv)


def main(device: str) -> None:
    # On a GPU that of most other tests, whose kernels are then compiled; the
    # interpreter has none of it.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    for case in CASES:
        ours(case, case.inputs(dtype, device))
        print(case, flush=True)
    packed(device, dtype)
    if device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    device, path = [*sys.argv[1:], *("cuda", "portable")[len(sys.argv) - 1 :]]
    with dispatch.force(path):
        main(device)
