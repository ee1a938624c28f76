"""The tile sizes and launch settings of the Hopper forward."""

from typing import NamedTuple


class ForwardTile(NamedTuple):
    """The forward kernel's tile sizes, and its launch: consumer warpgroups, tiles in
    flight, registers, programs."""

    consumers: int  # consumer warpgroups
    rows: int  # of queries, of each
    block_k: int  # keys a tile
    stages: int  # tiles of keys (and of values) in flight
    turns: bool = True  # see forward_warps.consume
    registers: int = 240  # of a consumer's thread, with two or three consumers
    # How many run at most on a multiprocessor, each doing several tiles; 0: one program a tile.
    programs: int = 0
    q_stages: int = 1  # tiles of queries in flight
    cap: int = 0  # registers a thread at launch; 0: what one program a multiprocessor allows
    # Of a causal call, each program does long and short tiles in pairs (forward_schedule.py).
    paired: bool = False
    tight: bool = False  # see forward_warps.consume
