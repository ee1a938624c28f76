"""What each of several NCCL ranks does for test_context_gpu.py: attention in bfloat16, each way, against one GPU.

python gpu_ranks.py FOLDER      as torchrun would; each rank writes FOLDER/RANK.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import job
from torch import Tensor

from flashtrain.distributed.context.attention import context_attention
from flashtrain.distributed.context.exchange import ContextGroup
from flashtrain.distributed.context.layout import balanced
from flashtrain_kernels import flash_attn_func, masks, reference

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2048, 4, 2, 64


def largest_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [(one.double() - other).abs().max().item() for one, other in zip(found, exact, strict=True)]


def differentiated(function, tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def one_rank(rank: int, folder: Path, shared: dict[str, str]) -> None:
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = ContextGroup()
    lengths = torch.tensor([700, 3, 1000, 45, 300])
    ids = torch.repeat_interleave(torch.arange(5), lengths)[None, :LENGTH]
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, LENGTH, count, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for count in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    found: dict[str, dict[str, list[float]]] = {}
    for name, on_host in {
        "causal": masks.causal(LENGTH),
        "documents": masks.document(ids, causal=True),
        "global window": masks.global_window(LENGTH, 32, (100, 0), causal=True),
    }.items():
        layout = balanced(on_host, group.size)
        mask = on_host._replace(queries=on_host.queries.cuda())
        for dropout in (0.0, 0.2):
            exact = differentiated(
                lambda *x, m=mask, p=dropout: reference.attention(*x, mask=m, dropout_p=p, dropout_seed=3),
                [x.double() for x in (q, k, v)], dout.double(),
            )  # fmt: skip
            one = differentiated(
                lambda *x, m=mask, p=dropout: flash_attn_func(*x, p, mask=m, dropout_seed=3), [q, k, v], dout
            )
            mine = [layout.shard(x, rank) for x in exact]
            of_one = largest_errors([layout.shard(x, rank) for x in one], mine)
            for way in ("all-to-all", "all-gather", "ring"):
                ours = differentiated(
                    lambda *x, m=mask, p=dropout, w=way, lay=layout: context_attention(
                        *x, layout=lay, group=group, mask=m, way=w, dropout_p=p, dropout_seed=3
                    ),
                    [layout.shard(x, rank) for x in (q, k, v)],
                    layout.shard(dout, rank),
                )
                found[f"{way}, {name}, dropout {dropout}"] = {"one": of_one, "ours": largest_errors(ours, mine)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(one_rank, (Path(sys.argv[1]), job(2)), nprocs=2)
