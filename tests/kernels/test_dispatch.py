"""Which implementation and tile a call gets."""

import itertools

import pytest
import torch
import tuning

import flashtrain_kernels as fk
from flashtrain_kernels import dispatch, environment, explain, flash_attn_func, masks, reference
from flashtrain_kernels.backends import Call
from flashtrain_kernels.backends.portable import tile_table
from flashtrain_kernels.backends.portable.tile_table import TILES, VARIANTS, Kind, Tile, Tiles
from flashtrain_kernels.masks import Mask
from flashtrain_kernels.options import Options


@pytest.fixture
def table_as_it_is(monkeypatch):
    """The tiles of a release for which the table has no others (others: test_triton_compat.py)."""
    monkeypatch.setattr(environment, "release", lambda: (3, 7))
    tile_table.table_row.cache_clear()
    yield
    tile_table.table_row.cache_clear()


def test_tensors_on_a_cpu_get_torchs_attention_and_those_on_cuda_the_kernels():
    assert dispatch.implementation_for("cpu") == "torch"
    assert dispatch.implementation_for("mps") == "torch"
    assert dispatch.implementation_for("cuda") == "portable"


def test_force_holds_within_its_context_only():
    with dispatch.force("reference"):
        assert dispatch.implementation_for("cpu") == "reference"
        assert not dispatch.runs_kernels(torch.device("cuda"))
    assert dispatch.implementation_for("cpu") == "torch"
    with (
        pytest.raises(
            ValueError, match="must be one of portable, hopper, torch, reference, not 'fast'"
        ),
        dispatch.force("fast"),
    ):
        pass


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [1, 64, 65, 128, 129, 256])
def test_the_table_has_a_row_for_every_gpu_dtype_and_head_dimension(capability, dtype, head_dim):
    tiles = tile_table.table_row(tile_table.architecture(capability), head_dim, dtype)
    for tile in (tiles.forward, tiles.dkdv, tiles.dq, tiles.dbias):
        assert tile.block_q % 16 == tile.block_k % 16 == 0


def test_a_variant_replaces_the_tiles_it_names_and_the_last_of_several_wins(table_as_it_is):
    plain = tile_table.table_row("sm_90", 64, torch.float16)
    variants = VARIANTS["sm_90", 16, 64]
    masked = tile_table.table_row("sm_90", 40, torch.float16, Kind(intervals=True))
    assert masked == plain._replace(**variants["intervals"])
    assert masked != plain
    every = tile_table.table_row("sm_90", 64, torch.float16, Kind(*[True] * len(Kind._fields)))
    assert every == plain._replace(**variants["rich"])


def test_an_architecture_without_a_row_borrows_one():
    for dtype, head_dim in ((torch.bfloat16, 256), (torch.float32, 64)):
        assert tile_table.table_row("sm_100", head_dim, dtype) == tile_table.table_row(
            "sm_90", head_dim, dtype
        )
    assert tile_table.table_row("sm_80", 64, torch.float32) == tile_table.table_row(
        "small", 64, torch.float32
    )


def test_a_plans_sizes_stay_and_no_tile_is_larger_than_a_block_of_a_block_mask():
    cpu = torch.device("cpu")
    with dispatch.force("portable", Tile(64, 32, 4, 2)):
        assert tile_table.plan_blocks(cpu, 64, torch.float32) == (64, 32) * 3
        x, planned_for = torch.zeros(1, 1024, 1, 64), (16, 32, 64, 128, 32, 16)
        planned = tile_table.tiles_of(
            Call(x, x, x, Options(0.125, mask=masks.full(1024).planned_for(planned_for)))
        )
        assert (planned.forward, planned.dq) == (Tile(16, 32, 4, 2), Tile(64, 128, 4, 2))
        assert (planned.dkdv, planned.dbias) == (Tile(32, 16, 4, 2), Tile(64, 32, 4, 2))
        blocks = torch.ones(1, 64, 2, dtype=torch.bool)
        mask = fk.block_mask(blocks, block_size=(16, 512), seqlen_q=1024, seqlen_k=1024)
        assert tile_table.tiles_of(Call(x, x, x, Options(0.125, mask=mask))) == Tiles.all(
            Tile(16, 32, 4, 2), True
        )


class NewKernels:
    """A backend for another GPU, which serves the forward alone; its kernel is the reference."""

    NAME, TITLE = "new", "new kernels"

    def unavailable(self, device):
        return None

    def serves(self, call, direction):
        return None if direction == "forward" else "no backward yet"

    def plan_blocks(self, mask, head_dim, dtype, rich, softcap):
        return (16,) * 6

    def forward(self, call):
        assert call.readied(self.plan_blocks).options.mask.plan.blocks == (16,) * 6
        return reference.forward_from(*call)

    def describe(self, call, direction):
        return "tiles of 16"


def test_another_backend_is_asked_in_its_turn_runs_what_it_serves_and_is_explained(monkeypatch):
    q = torch.randn(1, 40, 2, 8)
    mask = masks.causal(40)
    wanted = flash_attn_func(q, q, q, mask=mask)
    monkeypatch.setattr(dispatch, "BACKENDS", (NewKernels(), *dispatch.BACKENDS))
    monkeypatch.setattr(dispatch, "implementation_for", lambda device_type: "portable")
    monkeypatch.setattr(dispatch, "runs_kernels", lambda device: True)
    assert mask.planned(8, torch.float32).plan.blocks == (16,) * 6
    torch.testing.assert_close(flash_attn_func(q, q, q, mask=mask), wanted)
    line = explain(q, q, q, mask=mask)
    assert line.startswith("new kernels: ")
    assert "; forward tiles of 16; backward portable, dK/dV " in line
    assert line.endswith(" (no backward yet)")


def test_the_tuner_prints_rows_of_both_tables_and_tries_only_sizes_that_a_plan_allows(
    table_as_it_is,
):
    best = {"dq": Tile(64, 64, 4, 2, 168), "forward": Tile(128, 64, 4, 4)}
    row = tuning.row_of_table("sm_90", 64, torch.bfloat16, "plain", best)
    name, tiles = next(iter(eval(f"{{{row}}}", vars(tile_table)).items()))
    assert name == ("sm_90", 16, 64)
    assert tiles == TILES["sm_90", 16, 64]._replace(**best)
    variant = tuning.row_of_table("sm_90", 64, torch.bfloat16, "rich", best)
    assert eval(f"{{{variant}}}", vars(tile_table)) == {("sm_90", 16, 64): {"rich": best}}
    plain = TILES["sm_90", 16, 64].dq
    assert {tile[:2] for tile in tuning.candidates("dq", 64, "grouped", plain)} == {plain[:2]}
    assert len({tile[:2] for tile in tuning.candidates("dq", 64, "rich", plain)}) > 1


@pytest.mark.parametrize("call", itertools.chain(*tuning.CALLS.values()))
def test_the_tuner_has_options_for_every_call(call):
    options = tuning.options_for(call, Tile(32, 16, 4, 1), 64, 256, torch.device("cpu"))
    if isinstance(options.mask, Mask):
        assert options.mask.plan.blocks == (32, 16) * 3
    assert (options.dropout_p > 0) == ("dropout" in call)
    assert options.right == (0 if "causal" in call else None)


def test_gpus_before_sm_80_are_refused_with_what_to_use_instead():
    with pytest.raises(
        ValueError, match=r"sm_80.*this one has 7.5: use torch.*scaled_dot_product_attention"
    ):
        dispatch._require_sm80((7, 5))


def test_without_triton_a_gpu_call_reports_it(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._require_triton.cache_clear()
    with pytest.raises(ValueError, match="needs the package triton"):
        dispatch.runs_kernels(torch.device("cuda"))
    dispatch._require_triton.cache_clear()
