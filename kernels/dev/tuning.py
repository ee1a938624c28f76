"""Time candidate tiles on this machine's GPU and print the winners as rows for the
tables of tile_table.py.

    python kernels/dev/tuning.py --head-dim 64 128
    python kernels/dev/tuning.py --features rich

Each of the three kernels (forward, dkdv, dq) is timed alone on the same shapes, for the calls
of a class of features (CALLS): plain ones make a row of TILES, the others an entry of VARIANTS.
A candidate that needs more shared memory than the GPU has is left out. A winner is the tile
with the smallest sum of (its time / the best time) over the calls. B batch, S sequence, H
heads, D head dimension.
"""

import argparse
import math
from typing import Any

import torch

from flashtrain_kernels import masks
from flashtrain_kernels.backends import Call, Gradients
from flashtrain_kernels.backends.portable import tile_table
from flashtrain_kernels.backends.portable.backward import backward_launches
from flashtrain_kernels.backends.portable.forward import forward_launch
from flashtrain_kernels.backends.portable.tile_table import Tile, Tiles
from flashtrain_kernels.options import Options

KERNELS = ("forward", "dkdv", "dq")
# What is timed for each class of features.
CALLS = {
    "plain": ("full", "causal"),
    "scattered": ("global window", "shuffled"),
    "grouped": ("full, grouped", "causal, grouped"),
    "rich": ("causal, dropout",),
}
_GROUP = 4  # query heads a key head in grouped calls
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# (queries, keys, warps, stages[, cap on registers]). Some spill registers: compile_cases.py in the
# tests says whether a winner does, and a tile that spills does not go into the table at head
# dimensions 64 and 128.
CANDIDATES: dict[str, dict[int, list[tuple[int, ...]]]] = {
    "forward": {
        64: [
            (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 8, 2), (128, 128, 8, 3),
            (128, 64, 8, 3),
            (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3), (256, 64, 8, 3),
            (128, 128, 4, 2), (128, 128, 4, 3),
        ],
        128: [
            (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4),
            (64, 64, 4, 2),
            (64, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3),
        ],
        256: [(64, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2),
            (64, 64, 4, 2)],
    },
    "dkdv": {
        64: [
            (32, 64, 4, 3, 168), (32, 64, 4, 4, 168),
            (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
            (128, 128, 8, 2),
            (32, 64, 4, 3), (64, 128, 4, 2), (32, 128, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2),
        ],
        128: [
            (32, 128, 8, 2), (32, 128, 8, 3), (64, 128, 8, 1), (64, 128, 8, 2), (64, 128, 8, 3),
            (64, 64, 8, 2),
            (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 8, 3),
        ],
        256: [
            (32, 64, 8, 2), (32, 32, 8, 2), (16, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 2),
            (16, 64, 8, 3),
            (64, 32, 8, 2), (64, 32, 8, 3), (64, 32, 4, 2),
        ],
    },
    "dq": {
        64: [
            (64, 64, 4, 3, 168), (128, 64, 8, 3, 128),
            (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2),
            (128, 32, 4, 3),
            (128, 128, 8, 2), (128, 32, 8, 3), (64, 128, 4, 2), (64, 32, 4, 3),
        ],
        128: [
            (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2),
            (64, 32, 4, 2),
            (64, 32, 4, 3), (64, 64, 8, 2), (128, 64, 8, 1),
        ],
        256: [(64, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 3), (128, 32, 8, 2),
            (64, 64, 8, 1)],
    },
}  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--head-dim", type=int, nargs="+", default=[64, 128], choices=[64, 128, 256]
    )
    parser.add_argument("--features", default="plain", choices=sorted(CALLS))
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_DTYPES))
    parser.add_argument(
        "--seqlen", type=int, default=4096, help="tokens; batch * heads is chosen to fill the GPU"
    )
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("tuning needs an NVIDIA GPU")
    arch = tile_table.architecture(torch.cuda.get_device_capability())
    dtype, rows = _DTYPES[options.dtype], []
    for head_dim in options.head_dim:
        plain = tile_table.table_row(arch, head_dim, dtype)
        best = {
            name: _winner(
                name, candidates(name, head_dim, options.features, getattr(plain, name)),
                CALLS[options.features],
                head_dim, options.dtype, options.seqlen,
            )
            for name in options.kernels
        }  # fmt: skip
        rows.append(row_of_table(arch, head_dim, dtype, options.features, best))
    print(
        f"\nrows for tile_table.{'TILES' if options.features == 'plain' else 'VARIANTS'}:",
        *rows,
        sep="\n",
    )


def candidates(name: str, head_dim: int, features: str, plain: Tile) -> list[Tile]:
    """The tiles to try for a kernel. plain: the table's; only plain and rich calls may have
    tiles of another size."""
    tiles = [Tile(*numbers) for numbers in CANDIDATES[name][head_dim]]
    if features in ("plain", "rich"):
        return tiles
    block_q, block_k = plain[:2]
    sized = [Tile(block_q, block_k, warps, stages) for warps in (4, 8) for stages in (1, 2, 3, 4)]
    return list(dict.fromkeys([plain, *sized]))


def row_of_table(
    arch: str, head_dim: int, dtype: torch.dtype, features: str, best: dict[str, Tile]
) -> str:
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
        mask = masks.global_window(
            seqlen, seqlen // 8, (seqlen // 4, 0), causal=True, device=device
        )
    elif call == "shuffled":
        # The order of a rank of context parallelism: a piece from the front and its mirror
        # image from the back.
        pieces = torch.arange(seqlen, device=device).tensor_split(8)
        order = torch.cat([pieces[place] for place in (0, 7, 1, 6, 2, 5, 3, 4)])
        mask = masks.causal(seqlen, device=device).select(order, order)
    if mask is not None:
        mask = mask.planned_for((tile.block_q, tile.block_k) * 3)
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

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=_DTYPES[dtype])

    q, out, dout = (tensor(heads) for _ in range(3))
    k, v = (tensor(heads // (_GROUP if "grouped" in call else 1)) for _ in range(2))
    # About what a row of random scores gives: keeps the backward's exponentials in range.
    lse = torch.full((batch, heads, seqlen), math.log(seqlen) + 1.0, device="cuda")
    options = options_for(call, tile, head_dim, seqlen, q.device)
    given = Call(q, k, v, options)
    if name == "forward":
        return forward_launch(given, out, lse, tile)
    rows = (lse * math.log2(math.e), torch.zeros_like(lse))
    gradients = Gradients(
        dout, None, out, lse, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
    )
    launches = backward_launches(given, gradients, rows, Tiles.all(tile, together=False))
    return launches[1 if name == "dkdv" else 0]


def _winner(
    name: str, tiles: list[Tile], calls: tuple[str, ...], head_dim: int, dtype: str, seqlen: int
) -> Tile:  # fmt: skip
    """The tile of a kernel that loses least, summed over the calls, of those
    that run in all of them."""
    ratios = dict.fromkeys(tiles, 0.0)
    for call in calls:
        times = {tile: _milliseconds(name, tile, call, head_dim, dtype, seqlen) for tile in tiles}
        for tile, milliseconds in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {name}, {call}, D={head_dim}: {tile}: {milliseconds:.3f} ms", flush=True)
            ratios[tile] += milliseconds / min(times.values())
    return min(ratios, key=lambda tile: ratios[tile])


def _milliseconds(
    name: str, tile: Tile, call: str, head_dim: int, dtype: str, seqlen: int
) -> float:
    """The median of a launch; infinite where it does not compile, or the GPU has
    not the shared memory."""
    from triton.errors import TritonError
    from triton.testing import do_bench

    batch, heads = 4, 2048 // head_dim  # enough programs for many waves at every tile
    try:
        return do_bench(
            launch_for(name, tile, call, head_dim, dtype, seqlen, batch, heads).run,
            return_mode="median",
        )
    except TritonError:
        return math.inf


if __name__ == "__main__":
    main()
