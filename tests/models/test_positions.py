from __future__ import annotations

import cmath

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import LearnedPositions, RotaryPositions


def test_rotary_turns_each_pair_by_its_angle():
    rotary = RotaryPositions(6, base=100.0)
    x = torch.randn(1, 2, 1, 6, dtype=torch.float64)
    out = rotary(x, torch.tensor([[0, 5]]))
    torch.testing.assert_close(out[:, 0], x[:, 0])
    for pair in range(3):
        turned = complex(x[0, 1, 0, pair], x[0, 1, 0, pair + 3]) * cmath.exp(1j * 5 * 100.0 ** (-2 * pair / 6))
        assert complex(out[0, 1, 0, pair], out[0, 1, 0, pair + 3]) == pytest.approx(turned, abs=1e-12)


def test_rotary_scores_depend_on_the_distance_only():
    rotary = RotaryPositions(16)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    near = (rotary(q, torch.tensor([[7]])) * rotary(k, torch.tensor([[3]]))).sum()
    far = (rotary(q, torch.tensor([[1007]])) * rotary(k, torch.tensor([[1003]]))).sum()
    torch.testing.assert_close(near, far, atol=1e-10, rtol=0)


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


def test_rotary_refuses_an_odd_head_dimension():
    with pytest.raises(UserError, match=r"head dimension 7 with rotary positions. Possible: an even"):
        RotaryPositions(7)


def test_learned_positions_look_up_a_vector_each():
    table = LearnedPositions(8, 4)
    assert torch.equal(table(torch.tensor([[3, 0]], dtype=torch.int32))[0], table.weight[[3, 0]])


def test_learned_positions_past_the_context_are_refused():
    with pytest.raises(UserError, match=r"9 positions for a model with 8 learned ones. Possible: at most 8 tokens"):
        LearnedPositions(8, 4)(torch.tensor([[3, 8]]))
