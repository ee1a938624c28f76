"""Seconds of a process's first attention call, every kernel's compilation
included, printed as JSON.

    python kernels/dev/first_call.py [head dimensions]

Each row is a process of its own with an empty cache of Triton's; what importing torch and
Triton takes is not counted.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

CHILD = """
import json, sys, time
import torch, triton, triton.compiler.compiler
from triton import knobs
from flashtrain_kernels import flash_attn_func
head_dim, causal = int(sys.argv[1]), sys.argv[2] == "causal"
shape = (2, 2048, 8, head_dim)
given = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
q, k, v = (torch.randn(shape, **given) for _ in range(3))
compiled = {}
def note(*, src, times, **_):
    compiled[f"{src.name}_compile_seconds"] = round(times.total / 1e6, 2)
knobs.compilation.listener = note
def timed(do):
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = do()
    torch.cuda.synchronize()
    return found, round(time.perf_counter() - began, 4)
out, forward = timed(lambda: flash_attn_func(q, k, v, causal=causal))
_, backward = timed(lambda: torch.autograd.grad(out.sum(), (q, k, v)))
_, later = timed(
    lambda: torch.autograd.grad(flash_attn_func(q, k, v, causal=causal).sum(), (q, k, v))
)
print(json.dumps({
    "head_dim": head_dim, "mask": sys.argv[2], "forward_seconds": forward,
    "backward_seconds": backward, "later_seconds": later, **compiled,
}))
"""


def first_call(head_dim: int, mask: str) -> dict[str, Any]:
    """One row: seconds of the first forward, the first backward and a later pair, and of
    each kernel's compilation."""
    with tempfile.TemporaryDirectory() as empty:
        command = (sys.executable, "-c", CHILD, str(head_dim), mask)
        cache = {"TRITON_CACHE_DIR": empty}
        done = subprocess.run(
            command, env=os.environ | cache, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout)


if __name__ == "__main__":
    for head_dim in [int(word) for word in sys.argv[1:]] or [64, 128, 256]:
        for mask in ("full", "causal"):
            print(json.dumps(first_call(head_dim, mask)), flush=True)
