from __future__ import annotations

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import RotaryPositions
from flashtrain.models.longer_context import stretched
from flashtrain.models.rope_scaling import RopeScaling


def test_rotary_angles_are_exact_a_million_tokens_in():
    x = torch.randn(1, 3, 1, 64)
    positions = torch.tensor([[1_000_003, 2**20 - 1, 2**24 + 1]])
    # The frequencies that float32 has.
    pairs = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    angle = positions.double()[:, :, None, None] * pairs.double()
    first, second = x.double().chunk(2, dim=-1)
    exact = torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()),
        dim=-1,
    )
    torch.testing.assert_close(RotaryPositions(64)(x, positions).double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("factor", [2.0, 16.0])
def test_a_scaled_base_slows_the_slowest_pair_by_the_factor_and_leaves_the_fastest(factor):
    base = RopeScaling("ntk", factor).base(10000.0, 64)
    assert base == pytest.approx(10000 * factor ** (64 / 62))
    assert base ** -(62 / 64) == pytest.approx(10000 ** -(62 / 64) / factor)
    assert base**-0.0 == 1.0
    assert RopeScaling("ntk", 1.0).base(10000.0, 64) == 10000.0


@pytest.mark.parametrize(("factor", "head_dim"), [(0.5, 64), (float("nan"), 64)])
def test_a_factor_that_cannot_scale_is_refused(factor, head_dim):
    with pytest.raises(UserError, match="rope_factor"):
        RopeScaling("ntk", factor).base(10000.0, head_dim)


def test_rotary_survives_a_cast_of_the_model_to_bfloat16():
    x = torch.randn(1, 4, 2, 64)
    positions = torch.tensor([[0, 1, 5000, 100_000]])
    exact = RotaryPositions(64)(x.bfloat16().double(), positions)
    cast = RotaryPositions(64).bfloat16()(x.bfloat16(), positions)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.double(), exact, atol=0.03, rtol=0.01)


def test_rotary_holds_nothing_to_save_or_cast():
    assert RotaryPositions(64).state_dict() == {}
    assert not list(RotaryPositions(64).buffers())


def test_stretching_agrees_with_torchs_interpolation_at_an_odd_length():
    table = torch.randn(63, 8)
    theirs = torch.nn.functional.interpolate(
        table.t()[None], size=1000, mode="linear", align_corners=True
    )[0].t()
    torch.testing.assert_close(stretched(table, 1000), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_table_stretched_to_its_own_length_is_itself_in_its_own_dtype(dtype):
    table = torch.randn(7, 4).to(dtype)
    assert torch.equal(stretched(table, 7), table)
    assert stretched(table, 9).dtype == dtype
    assert torch.equal(stretched(table[:1], 4), table[:1].expand(4, 4))
