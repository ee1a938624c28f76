"""Time candidate tiles on this machine's GPU and print the winners as rows for dispatch.py's table.

    python -m flashtrain_kernels.tuning --head-dim 64 128 --out tiles.json

Each of the three kernels (forward, dkdv, dq) is timed alone on the same shapes, full and causal. Candidates are first
compiled by several processes at once into Triton's cache; one that does not compile or needs more shared memory than
the GPU
has is left out. A winner is the tile with the smallest sum of (its time / the best time) over full and causal.
B batch, S sequence, H heads, D head dimension.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from . import dispatch
from .dispatch import Tile, Tiles

KERNELS = ("forward", "dkdv", "dq")
Job = tuple[str, Tile, bool]  # kernel, tile, causal
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# (queries, keys, warps, stages[, cap on registers]). Some spill registers: compile_cases.py in the tests says whether a
# winner does, and a tile that spills does not go into the table at head dimensions 64 and 128.
CANDIDATES: dict[str, dict[int, list[tuple[int, ...]]]] = {
    "forward": {
        64: [
            (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3),
            (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3), (256, 64, 8, 3),
            (128, 128, 4, 2), (128, 128, 4, 3),
        ],
        128: [
            (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 64, 4, 2),
            (64, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3),
        ],
        256: [(64, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (64, 64, 4, 2)],
    },
    "dkdv": {
        64: [
            (32, 64, 4, 3, 168), (32, 64, 4, 4, 168),
            (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2),
            (32, 64, 4, 3), (64, 128, 4, 2), (32, 128, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2),
        ],
        128: [
            (32, 128, 8, 2), (32, 128, 8, 3), (64, 128, 8, 1), (64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 8, 2),
            (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 8, 3),
        ],
        256: [(32, 64, 8, 2), (32, 32, 8, 2), (16, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 2), (16, 64, 8, 3)],
    },
    "dq": {
        64: [
            (64, 64, 4, 3, 168), (128, 64, 8, 3, 128),
            (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 32, 4, 3),
            (128, 128, 8, 2), (128, 32, 8, 3), (64, 128, 4, 2), (64, 32, 4, 3),
        ],
        128: [
            (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2),
            (64, 32, 4, 3), (64, 64, 8, 2), (128, 64, 8, 1),
        ],
        256: [(64, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 3), (128, 32, 8, 2), (64, 64, 8, 1)],
    },
}  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashtrain_kernels.tuning", description=__doc__.split("\n\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], choices=[64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_DTYPES))
    parser.add_argument("--seqlen", type=int, default=4096, help="tokens; batch * heads is chosen to fill the GPU")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; candidates are interleaved within a round")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1), help="compile processes")
    parser.add_argument("--out", type=Path, help="write every measurement to this JSON file")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("tuning needs an NVIDIA GPU")
    results: list[dict[str, Any]] = []
    winners: dict[int, dict[str, Tile]] = {}
    for head_dim in options.head_dim:
        jobs = [
            (name, Tile(*candidate), causal)
            for name in options.kernels
            for candidate in CANDIDATES[name][head_dim]
            for causal in (False, True)
        ]
        started = time.monotonic()
        usable = _compile_all(jobs, head_dim, options.dtype, options.processes)
        print(f"D={head_dim}: {len(usable)} of {len(jobs)} compiled, {time.monotonic() - started:.0f} s", flush=True)
        rows = _time_all(usable, head_dim, options.dtype, options.seqlen, options.rounds)
        results += rows
        winners[head_dim] = _winners(rows, options.kernels)
    if options.out:
        report = {"device": torch.cuda.get_device_name(), "dtype": options.dtype, "rows": results}
        options.out.write_text(json.dumps(report, indent=1))
    arch = dispatch.architecture(torch.cuda.get_device_capability())
    bits = _DTYPES[options.dtype].itemsize * 8
    print("\nrows for dispatch.TILES:")
    for head_dim, best in winners.items():
        old = dispatch.table_row(arch, head_dim, _DTYPES[options.dtype])
        tiles = Tiles(*(best.get(name, getattr(old, name)) for name in KERNELS))
        text = ", ".join(f"Tile({', '.join(str(number) for number in tile)})" for tile in tiles)
        print(f'    ("{arch}", {bits}, {head_dim}): Tiles({text}),')


def launch_for(
    name: str, tile: Tile, causal: bool, head_dim: int, dtype: str, seqlen: int, batch: int, heads: int
) -> Any:
    """The launch of one kernel with one tile, on fresh random tensors."""
    from .portable.backward import backward_launches
    from .portable.forward import forward_launch

    def tensor(*shape: int, kind: torch.dtype = _DTYPES[dtype]) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=kind)

    q, k, v, out = (tensor(batch, seqlen, heads, head_dim) for _ in range(4))
    # About what a row of random scores gives: keeps the backward's exponentials in range.
    lse = torch.full((batch, heads, seqlen), math.log(seqlen) + 1.0, device="cuda")
    scale = head_dim**-0.5
    if name == "forward":
        return forward_launch(q, k, v, out, lse, None, scale, causal, tile)
    rows = torch.stack([lse * math.log2(math.e), torch.zeros_like(lse)])
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    launches = backward_launches(
        tensor(*out.shape), None, q, k, v, out, lse, None, scale, causal, dq, dk, dv, rows, tile, tile
    )
    return launches[1 if name == "dkdv" else 0]


def _compile(name: str, tile: Tile, causal: bool, head_dim: int, dtype: str) -> None:
    launch_for(name, tile, causal, head_dim, dtype, seqlen=64, batch=1, heads=2).compile()


def _compile_all(jobs: list[Job], head_dim: int, dtype: str, processes: int) -> list[Job]:
    """The jobs whose kernel compiles, compiled in fresh processes (CUDA does not survive a fork)."""
    usable = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_compile, *job, head_dim, dtype): job for job in jobs}
        for future in as_completed(waiting):
            problem = future.exception()
            if problem is None:
                usable.append(waiting[future])
            else:
                print(f"  left out: {_label(waiting[future])}: {type(problem).__name__}", flush=True)
    return sorted(usable)


def _time_all(jobs: list[Job], head_dim: int, dtype: str, seqlen: int, rounds: int) -> list[dict[str, Any]]:
    """Medians of interleaved rounds, so that a clock that drifts hits every candidate alike."""
    from triton.runtime.errors import OutOfResources

    batch, heads = 4, 2048 // head_dim  # enough programs for many waves at every tile
    measured: list[dict[str, Any]] = []
    for name, causal in itertools.product(KERNELS, (False, True)):
        launches = {}
        for job in jobs:
            if (job[0], job[2]) == (name, causal):
                launch = launch_for(*job, head_dim, dtype, seqlen, batch, heads)
                try:
                    launch.run()
                except OutOfResources:
                    print(
                        f"  left out: {_label(job)}: needs more shared memory or registers than the GPU has", flush=True
                    )
                    continue
                launches[job[1]] = launch
        samples: dict[Tile, list[float]] = {tile: [] for tile in launches}
        for _ in range(rounds):
            for tile, launch in launches.items():
                samples[tile] += _milliseconds(launch)
        products = {"forward": 2, "dkdv": 4, "dq": 3}[name]
        flops = products * 2 * batch * heads * head_dim * seqlen * seqlen / (2 if causal else 1)
        for tile, times in sorted(samples.items(), key=lambda item: statistics.median(item[1])):
            row: dict[str, Any] = {"kernel": name, "head_dim": head_dim, "causal": causal, "tile": list(tile)}
            row |= {"milliseconds": statistics.median(times)}
            row |= {"tflops": flops / row["milliseconds"] / 1e9}
            measured.append(row)
            print(
                f"  {_label((name, tile, causal))}: {row['milliseconds']:.3f} ms, {row['tflops']:.0f} TFLOP/s",
                flush=True,
            )
        launches.clear()
        torch.cuda.empty_cache()
    return measured


def _milliseconds(launch: Any, repeats: int = 6) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    launch.run()
    events[0].record()
    for event in events[1:]:
        launch.run()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def _winners(rows: list[dict[str, Any]], kernels: list[str]) -> dict[str, Tile]:
    best: dict[str, Tile] = {}
    for name in kernels:
        scores: dict[Tile, list[float]] = {}
        for causal in (False, True):
            here = [row for row in rows if row["kernel"] == name and row["causal"] == causal]
            for row in here:
                fastest = min(other["milliseconds"] for other in here)
                scores.setdefault(Tile(*row["tile"]), []).append(row["milliseconds"] / fastest)
        both = {tile: sum(ratios) for tile, ratios in scores.items() if len(ratios) == 2}
        if both:
            best[name] = min(both, key=lambda tile: both[tile])
    return best


def _label(job: Job) -> str:
    name, tile, causal = job
    return f"{name} {'causal' if causal else 'full'} {tile}"


if __name__ == "__main__":
    main()
