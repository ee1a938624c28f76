"""Before rows=as-called are measured on a GPU, parallel processes call every baseline once,
to compile its kernels.

The compiled kernels stay on disk. One process alone would take longer to
compile them than to measure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.multiprocessing

from flashtrain.announce import quieten
from flashtrain_recipes.attention_benchmark.baselines import all_baselines
from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, make_sets

_MAX_PROCESSES = 16  # a container may show the processors of its whole host


def warm_up(calls: Sequence[tuple[Case, str]], seconds: float, device: str = "cuda") -> None:
    """Call baselines once in parallel processes, which fills the compile caches on disk
    before anything is timed.

    Args:
        calls: (case, name of the baseline) of each call.
        seconds: the time for all calls together; calls that have not ended by then are
            given up without an error.
        device: the type of device to call on.
    """
    count = min(os.cpu_count() or 1, _MAX_PROCESSES, len(calls))
    context = torch.multiprocessing.get_context("spawn")  # CUDA allows no other
    with context.Pool(count, _begin) as pool:  # whose end kills the processes, whatever they do
        pool.starmap_async(call_once, [(*call, device) for call in calls], chunksize=1).wait(
            seconds
        )


def call_once(case: Case, name: str, device_type: str) -> None:
    """Call a baseline forward, and backward where the case has it. Errors are ignored:
    measuring reports them."""
    device = torch.device(device_type)
    (baseline,) = [one for one in all_baselines(device_type) if one.name == name]
    if case.page is not None:
        case = replace(case, batch=1)  # of a cache one sequence, which compiles what many do
    with (
        contextlib.suppress(Exception),
        baseline.within(),
        torch.set_grad_enabled(case.page is None),
    ):
        (one,) = make_sets(case, device, 0, 0)
        out = baseline.attend(case, Context(case, device))(one)
        if out.requires_grad:
            torch.autograd.grad(out, one.leaves, one.dout)
    if device_type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:  # noqa: BLE001 - the GPU is lost to this process: another takes its place
            os._exit(1)


def _begin() -> None:
    quieten()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the others compile meanwhile
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
