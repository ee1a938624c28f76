"""Compile the kernel of linear_cross_entropy for GPUs that need not be there: python loss_compile_cases.py 90"""

import json
import sys

import torch
from ahead_of_time import compile_launch

from flashtrain_kernels.backends.portable.cross_entropy import softmax_rows_launch

for capability in map(int, sys.argv[1:]):
    for dtype in (torch.bfloat16, torch.float32):
        for gradient in (False, True):
            logits = torch.empty(100, 50304, dtype=dtype, device="meta")
            labels, losses = torch.empty(100, dtype=torch.int64, device="meta"), torch.empty(100, device="meta")
            launch = softmax_rows_launch(logits, labels, losses, 50257, -100, gradient)
            compiled = compile_launch(launch, capability)
            print(json.dumps({"capability": capability, "spills": compiled.spills}))
