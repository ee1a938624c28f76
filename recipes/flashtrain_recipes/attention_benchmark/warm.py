"""Before rows=as-called are measured: processes beside each other call everything once, forward and backward. Compiled
kernels then lie in their caches on disk; and a kernel that breaks the GPU, or never ends, does so in another process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

from flashtrain.announce import quieten
from flashtrain_recipes.attention_benchmark.cases import Case
from flashtrain_recipes.attention_benchmark.inputs import Context, make_sets
from flashtrain_recipes.attention_benchmark.peers import Peer, all_peers
from flashtrain_recipes.benchmark_runner.measuring import first_line

HANG_SECONDS = 30.0  # no first call takes so long, a compile included
_MOST_PROCESSES = 16  # a container may show the processors of its whole host
Task = tuple[Case, str]  # and the implementation's name


class _Told(NamedTuple):
    """What a process says when it begins a task, and (broke: why) when that broke its GPU. at: of time.monotonic()."""

    worker: int
    task: int
    at: float
    broke: str = ""


def warm_up(tasks: Sequence[Task], device: str, seconds: float, workers: int | None = None) -> dict[Task, str]:
    """Call each task once, for so many seconds at most; what must not be called again, with the reason.

    workers: processes; None: as many as there are processors, to 16.
    """
    count = min(workers or os.cpu_count() or 1, _MOST_PROCESSES, len(tasks))
    until = time.monotonic() + seconds
    context: Any = torch.multiprocessing.get_context("spawn")  # CUDA allows no other
    queue, following = context.SimpleQueue(), context.Value("i", 0)
    processes = [
        context.Process(target=_work, args=(number, list(tasks), following, device, queue), daemon=True)
        for number in range(count)
    ]
    last: dict[int, _Told] = {}
    broken: dict[Task, str] = {}
    try:
        for process in processes:
            process.start()
        while time.monotonic() < until and any(process.exitcode is None for process in processes):
            time.sleep(0.1)
            _hear(queue, last)
        _hear(queue, last)
        for told in last.values():
            code = processes[told.worker].exitcode
            hangs = code is None and time.monotonic() - told.at > HANG_SECONDS
            reason = told.broke or (f"its process ended with {code}" if code else "")
            if hangs or reason:
                broken[tasks[told.task]] = reason or f"a first call did not end in {HANG_SECONDS:g} s"
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(5.0)  # one whose GPU hangs may end later
    return broken


def _hear(queue: Any, last: dict[int, _Told]) -> None:
    while not queue.empty():
        told = _Told(*queue.get())
        last[told.worker] = told


def _work(number: int, tasks: list[Task], following: Any, device: str, queue: Any) -> None:
    """One process: always the task that nobody has begun yet. What merely fails says so when it is measured.

    following: a shared integer, that task's number.
    """
    quieten()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the others compile meanwhile
    peers = {peer.name: peer for peer in all_peers(torch.device(device).type)}
    for peer in peers.values():
        peer.missing(torch.device(device))  # imports what it needs: no part of a first call
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        while True:
            with following.get_lock():
                task, following.value = following.value, following.value + 1
            if task >= len(tasks):
                return
            case, name = tasks[task]
            queue.put(tuple(_Told(number, task, time.monotonic())))
            peer = peers[name]
            with contextlib.suppress(Exception):
                call_once(case, peer, torch.device(device))
            try:
                if device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
            except Exception as error:  # noqa: BLE001 - the GPU is lost to this process, whatever it is called
                queue.put(tuple(_Told(number, task, time.monotonic(), first_line(error))))
                os._exit(0)  # without the calls that would wait for that GPU


def call_once(case: Case, peer: Peer, device: torch.device) -> None:
    """Forward, and backward where the case has it; of a cache one sequence, which compiles what many do."""
    if case.page is not None:
        case = replace(case, batch=1)
    (one,) = make_sets(case, device, 0, 0)
    with peer.within(), torch.set_grad_enabled(case.page is None):
        out = peer.attend(case, Context(case, device))(one)
        if out.requires_grad:
            torch.autograd.grad(out, peer.leaves(one), one.dout)
