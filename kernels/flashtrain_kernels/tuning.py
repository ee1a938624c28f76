"""Time candidate tiles on this machine's GPU and print the winners as rows for the tables of tile_table.py.

    python -m flashtrain_kernels.tuning --head-dim 64 128 --out tiles.json
    python -m flashtrain_kernels.tuning --features rich

Each of the three kernels (forward, dkdv, dq) is timed alone on the same shapes, for the calls of a class of features
(CALLS): plain ones make a row of TILES, the others an entry of VARIANTS. Candidates are first compiled by several
processes at once into Triton's cache; one that does not compile or needs more shared memory than the GPU has is left
out, as is one of another size than the table's where a mask's plan fixes the size. A winner is the tile with the
smallest sum of (its time / the best time) over the calls.
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

from . import masks
from .backends.portable import tile_table
from .backends.portable.tile_table import Tile
from .masks.mask import build_plan
from .options import Options

KERNELS = ("forward", "dkdv", "dq")
Job = tuple[str, Tile, str]  # kernel, tile, call
# What is timed for each class of features.
CALLS = {
    "plain": ("full", "causal"),
    "scattered": ("global window", "shuffled"),
    "grouped": ("full, grouped", "causal, grouped"),
    "rich": ("causal, dropout",),
}
_GROUP = 4  # query heads a key head in grouped calls
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
        256: [
            (32, 64, 8, 2), (32, 32, 8, 2), (16, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 2), (16, 64, 8, 3),
            (64, 32, 8, 2), (64, 32, 8, 3), (64, 32, 4, 2),
        ],
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
    parser.add_argument("--features", default="plain", choices=sorted(CALLS))
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_DTYPES))
    parser.add_argument("--seqlen", type=int, default=4096, help="tokens; batch * heads is chosen to fill the GPU")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; candidates are interleaved within a round")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1), help="compile processes")
    parser.add_argument("--out", type=Path, help="write every measurement to this JSON file")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("tuning needs an NVIDIA GPU")
    arch = tile_table.architecture(torch.cuda.get_device_capability())
    results: list[dict[str, Any]] = []
    winners: dict[int, dict[str, Tile]] = {}
    for head_dim in options.head_dim:
        plain = tile_table.table_row(arch, head_dim, _DTYPES[options.dtype])
        jobs = [
            (name, tile, call)
            for name in options.kernels
            for tile in candidates(name, head_dim, options.features, getattr(plain, name))
            for call in CALLS[options.features]
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
    print(f"\nrows for tile_table.{'TILES' if options.features == 'plain' else 'VARIANTS'}:")
    for head_dim, best in winners.items():
        print(row_of_table(arch, head_dim, _DTYPES[options.dtype], options.features, best))


def candidates(name: str, head_dim: int, features: str, plain: Tile) -> list[Tile]:
    """The tiles to try for a kernel. plain: the table's; only plain and rich calls may have tiles of another size."""
    tiles = [Tile(*numbers) for numbers in CANDIDATES[name][head_dim]]
    if features in ("plain", "rich"):
        return tiles
    block_q, block_k = plain[:2]
    sized = [Tile(block_q, block_k, warps, stages) for warps in (4, 8) for stages in (1, 2, 3, 4)]
    return list(dict.fromkeys([plain, *sized]))


def row_of_table(arch: str, head_dim: int, dtype: torch.dtype, features: str, best: dict[str, Tile]) -> str:
    """The text of a row of tile_table.TILES, or of VARIANTS, with these tiles."""
    key = f'("{arch}", {dtype.itemsize * 8}, {head_dim})'
    if features != "plain":
        entry = ", ".join(f'"{name}": {_written(tile)}' for name, tile in best.items())
        return f'    {key}: {{"{features}": {{{entry}}}}},'
    old = tile_table.table_row(arch, head_dim, dtype)
    tiles = {"forward": old.forward, "dkdv": old.dkdv, "dq": old.dq, "dbias": old.dbias, **best}
    together = ", together=True" if old.together else ""  # not tuned: kernels are timed one by one
    return f"    {key}: Tiles({', '.join(map(_written, tiles.values()))}{together}),"


def _written(tile: Tile) -> str:
    numbers = tile if tile.registers else tile[:4]
    return f"Tile({', '.join(str(number) for number in numbers)})"


def options_for(call: str, tile: Tile, head_dim: int, seqlen: int, device: torch.device) -> Options:
    """The options of a call, its mask planned for the tile."""
    mask = None
    if call == "global window":
        mask = masks.global_window(seqlen, seqlen // 8, (seqlen // 4, 0), causal=True, device=device)
    elif call == "shuffled":
        # The order of a rank of context parallelism: a piece from the front and its mirror image from the back.
        pieces = torch.arange(seqlen, device=device).tensor_split(8)
        order = torch.cat([pieces[place] for place in (0, 7, 1, 6, 2, 5, 3, 4)])
        mask = masks.causal(seqlen, device=device).select(order, order)
    if mask is not None:
        mask = mask._replace(plan=build_plan(mask, (tile.block_q, tile.block_k) * 3))
    dropout = "dropout" in call
    return Options(
        scale=head_dim**-0.5,
        right=0 if "causal" in call else None,
        dropout_p=0.1 if dropout else 0.0,
        seed=torch.tensor([1, 0, 0], device=device) if dropout else None,
        mask=mask,
    )


def launch_for(
    name: str, tile: Tile, call: str, head_dim: int, dtype: str, seqlen: int, batch: int, heads: int
) -> Any:  # fmt: skip
    """The launch of one kernel with one tile, on fresh random tensors."""
    from .backends.portable.backward import backward_launches
    from .backends.portable.forward import forward_launch

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=_DTYPES[dtype])

    q, out, dout = (tensor(heads) for _ in range(3))
    k, v = (tensor(heads // (_GROUP if "grouped" in call else 1)) for _ in range(2))
    # About what a row of random scores gives: keeps the backward's exponentials in range.
    lse = torch.full((batch, heads, seqlen), math.log(seqlen) + 1.0, device="cuda")
    options = options_for(call, tile, head_dim, seqlen, q.device)
    if name == "forward":
        return forward_launch(q, k, v, out, lse, options, tile)
    rows = (lse * math.log2(math.e), torch.zeros_like(lse))
    gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    launches = backward_launches(dout, None, q, k, v, out, lse, options, gradients, rows, tile, tile, together=False)
    return launches[1 if name == "dkdv" else 0]


def _compile(name: str, tile: Tile, call: str, head_dim: int, dtype: str) -> None:
    launch_for(name, tile, call, head_dim, dtype, seqlen=64, batch=1, heads=_GROUP).compile()


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
    for name, call in dict.fromkeys((job[0], job[2]) for job in jobs):
        launches = {}
        for job in jobs:
            if (job[0], job[2]) == (name, call):
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
        flops = products * 2 * batch * heads * head_dim * seqlen * seqlen * _visible_share(call, seqlen)
        for tile, times in sorted(samples.items(), key=lambda item: statistics.median(item[1])):
            row: dict[str, Any] = {"kernel": name, "head_dim": head_dim, "call": call, "tile": list(tile)}
            row |= {"milliseconds": statistics.median(times)}
            row |= {"tflops": flops / row["milliseconds"] / 1e9}
            measured.append(row)
            print(
                f"  {_label((name, tile, call))}: {row['milliseconds']:.3f} ms, {row['tflops']:.0f} TFLOP/s",
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


def _visible_share(call: str, seqlen: int) -> float:
    if call == "global window":
        mask = masks.global_window(seqlen, seqlen // 8, (seqlen // 4, 0), causal=True)
        return mask.dense().float().mean().item()
    return 0.5 if "causal" in call or call == "shuffled" else 1.0


def _winners(rows: list[dict[str, Any]], kernels: list[str]) -> dict[str, Tile]:
    """For each kernel the tile that loses least, summed over the calls, of those that ran in all of them."""
    best: dict[str, Tile] = {}
    for name in kernels:
        own = [row for row in rows if row["kernel"] == name]
        calls = {row["call"] for row in own}
        scores: dict[Tile, list[float]] = {}
        for row in own:
            fastest = min(other["milliseconds"] for other in own if other["call"] == row["call"])
            scores.setdefault(Tile(*row["tile"]), []).append(row["milliseconds"] / fastest)
        all_calls = {tile: sum(ratios) for tile, ratios in scores.items() if len(ratios) == len(calls)}
        if all_calls:
            best[name] = min(all_calls, key=lambda tile: all_calls[tile])
    return best


def _label(job: Job) -> str:
    name, tile, call = job
    return f"{name}, {call}: {tile}"


if __name__ == "__main__":
    main()
