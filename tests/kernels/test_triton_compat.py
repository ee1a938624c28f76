"""Tiles under other releases of Triton: only what their tables name differs, and one plan
still serves every call."""

import pytest
import torch

from flashtrain_kernels import environment
from flashtrain_kernels.backends.portable import tile_table
from flashtrain_kernels.backends.portable.tile_table import TILES, VARIANTS, Kind, Tile

TABLES = {(3, 6): tile_table.OLDEST, (3, 9): tile_table.NEWEST, (4, 0): tile_table.NEWEST}
row = tile_table.table_row.__wrapped__  # without what other releases left in its cache


@pytest.mark.parametrize("installed", TABLES)
def test_a_release_gets_the_tiles_that_its_table_names(installed, monkeypatch):
    monkeypatch.setattr(environment, "release", lambda: installed)
    for (arch, _, head_dim), kinds in TABLES[installed].items():
        for name, tiles in kinds.items():
            kind = Kind() if name == "plain" else Kind(**{name: True})
            got = row(arch, head_dim, torch.bfloat16, kind)._asdict()
            assert {kernel: got[kernel] for kernel in tiles} == {
                kernel: Tile(*tile) for kernel, tile in tiles.items()
            }


@pytest.mark.parametrize("installed", [(0, 0), (3, 7), (3, 8)])
def test_the_table_stands_as_it_is_under_the_release_it_was_measured_with_and_unknown_ones(
    installed, monkeypatch
):
    monkeypatch.setattr(environment, "release", lambda: installed)
    for key, tiles in TILES.items():
        arch, bits, head_dim = key
        dtype = torch.bfloat16 if bits == 16 else torch.float32
        assert row(arch, head_dim, dtype) == tiles
        wanted = tiles._replace(**VARIANTS.get(key, {}).get("rich", {}))
        assert row(arch, head_dim, dtype, Kind(rich=True)) == wanted


@pytest.mark.parametrize("installed", TABLES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_plan_serves_every_call_with_a_mask(installed, arch, head_dim, monkeypatch):
    monkeypatch.setattr(environment, "release", lambda: installed)
    for rich in (False, True):
        planned = row(arch, head_dim, torch.bfloat16, Kind(intervals=True, rich=rich))
        for names in (
            ["scattered"],
            ["scattered", "permuted"],
            ["grouped"],
            ["scattered", "grouped"],
        ):
            others = dict.fromkeys(names, True)
            tiles = row(arch, head_dim, torch.bfloat16, Kind(intervals=True, rich=rich, **others))
            for kernel in ("forward", "dq", "dkdv"):
                assert getattr(tiles, kernel)[:2] == getattr(planned, kernel)[:2]
