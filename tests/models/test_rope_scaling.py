"""Scaled rotary positions: transformers' formulas in float64, and the angles
that older runs had."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers import modeling_rope_utils

from flashtrain.errors import UserError
from flashtrain.models import RotaryPositions, with_context
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.rope_scaling import RopeScaling

# Entries of published models, with their base and head dimension.
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED = {
    "llama-3.1-8b": ({"rope_type": "llama3", **LLAMA3}, 5e5, 128),
    "llama-3.2-1b": ({"rope_type": "llama3", **LLAMA3, "factor": 32.0}, 5e5, 64),
    "qwen2.5-7b": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        1e6, 128),
    "deepseek-v2": (
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
         "mscale": 0.707,
         "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}, 1e4, 64,
    ),
    "linear": ({"rope_type": "linear", "factor": 8.0}, 1e4, 128),
}  # fmt: skip
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
OTHERS = {
    "not truncated": ({**YARN, "factor": 16.0, "truncate": False}, 1e6, 128),
    "given attention factor": (
        {**YARN, "factor": 3.0, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
        1e4,
        80,
    ),
    "short": ({**YARN, "factor": 2.0, "original_max_position_embeddings": 16}, 1e4, 8),
}


class Float64Torch:
    """torch, where float32 is float64."""

    def __getattr__(self, name: str):
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def theirs(name: str, *, exact: bool) -> tuple[torch.Tensor, float]:
    """transformers' inverse frequencies and attention factor; exact: in float64."""
    entries, base, head_dim = {**PUBLISHED, **OTHERS}[name]
    config = transformers.LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, rope_parameters={"rope_theta": base, **entries}
    )
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(modeling_rope_utils, "torch", Float64Torch())
        return modeling_rope_utils.ROPE_INIT_FUNCTIONS[entries["rope_type"]](config)


def ours(name: str) -> tuple[torch.Tensor, float]:
    entries, base, head_dim = {**PUBLISHED, **OTHERS}[name]
    return RopeScaling.of_entries(entries).frequencies(head_dim, base)


def ulps(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in units of float32's last place."""
    unit = torch.exp2(expected.double().log2().floor() - 23)
    return float(((given.double() - expected.double()).abs() / unit).max())


@pytest.mark.parametrize("name", [*PUBLISHED, *OTHERS])
def test_frequencies_and_attention_factor_are_transformers_formulas_in_float64(name) -> None:
    (frequencies, factor), (expected, their_factor) = ours(name), theirs(name, exact=True)
    assert frequencies.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(frequencies, expected, rtol=1e-14, atol=0)
    assert abs(factor - their_factor) <= math.ulp(their_factor)
    assert ulps(frequencies.float(), expected) <= 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_float32_frequencies_are_within_4_units_in_the_last_place(name) -> None:
    assert ulps(ours(name)[0], theirs(name, exact=False)[0]) <= 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_angles_at_131072_positions_are_those_of_the_formulas(name) -> None:
    entries, base, head_dim = PUBLISHED[name]
    inverse, factor = theirs(name, exact=True)
    positions = torch.tensor([[0, 1, 511, 4097, 65_535, 131_071, 131_072]])
    angles = positions[0, :, None].double() * inverse
    expected = torch.cat((angles.cos(), angles.sin()), -1) * factor
    x = torch.zeros(1, 7, 1, head_dim, dtype=torch.float64)
    x[..., : head_dim // 2] = 1  # the pair (1, 0) becomes (cos, sin)
    rotary = RotaryPositions(head_dim, base, RopeScaling.of_entries(entries))
    torch.testing.assert_close(rotary(x, positions)[0, :, 0], expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(
        rotary(x.float(), positions)[0, :, 0].double(), expected, rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_no_scaling_and_ntk_have_the_bits_that_older_runs_had(dtype, factor) -> None:
    base = 500.0 * factor ** (64 / 62) if factor != 1 else 500.0
    x, positions = (
        torch.randn(2, 5, 3, 64).to(dtype),
        torch.tensor([[0, 3, 700, 100_000, 2**20 + 7]]),
    )
    precise = torch.promote_types(dtype, torch.float32)
    turns = positions.double()[:, :, None, None] * (
        (base ** -(torch.arange(0, 64, 2, dtype=precise) / 64)).double() * (1 / math.tau)
    )
    angle = (turns - turns.floor()).to(precise) * math.tau
    first, second = x.to(precise).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    older = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(dtype)
    assert torch.equal(RotaryPositions(64, 500.0, RopeScaling(factor=factor))(x, positions), older)


def llama(**options) -> DecoderConfig:
    return DecoderConfig.of_size("demo", "llama", vocab_size=13, context=64, **options)


def test_files_of_older_runs_are_read_and_written_as_ever() -> None:
    for factor in (1.0, 4.0):
        config = llama(rope_base=500.0, rope_factor=factor)
        assert {name: value for name, value in config.plain().items() if "rope" in name} == {
            "rope_base": 500.0, "rope_factor": factor,
        }  # fmt: skip
        assert DecoderConfig.of_plain(config.plain()) == config
    without = {name: value for name, value in llama().plain().items() if name != "rope_factor"}
    assert DecoderConfig.of_plain(without) == llama()


@pytest.mark.parametrize("kind", ["ntk", "linear", "yarn", "llama3"])
def test_a_kind_and_a_factor_scale_from_the_context_without_scaling(kind) -> None:
    config = llama(rope=kind, rope_factor=4.0)
    assert config.rope == RopeScaling(kind, 4.0, 16 if kind in ("yarn", "llama3") else 0)
    assert DecoderConfig.of_plain(config.plain()) == config
    grown, _ = with_context(llama(), {}, 256, rope=kind, rope_factor=4.0)
    assert grown.rope == RopeScaling(kind, 4.0, 64 if kind in ("yarn", "llama3") else 0)
    assert with_context(grown, {}, 512, rope_factor=8.0)[0].rope == RopeScaling(
        kind, 8.0, grown.rope.original_max_position_embeddings
    )


def test_a_second_scaling_a_kind_without_a_factor_and_unknown_kinds_are_refused() -> None:
    yarn = llama(rope="yarn", rope_factor=4.0)
    with pytest.raises(
        UserError, match=r"model\.rope=linear would scale positions twice: the weights have yarn"
    ):
        with_context(yarn, {}, 128, rope="linear", rope_factor=2.0)
    with pytest.raises(UserError, match=r"model\.rope=yarn needs model\.rope_factor"):
        llama(rope="yarn")
    with pytest.raises(UserError, match="rope_type 'dynamic'"):
        llama(rope="dynamic", rope_factor=2.0)
    with pytest.raises(UserError, match="rope_factor=4 with learned positions"):
        DecoderConfig.of_size("demo", vocab_size=13, context=64, rope="yarn", rope_factor=4.0)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_scaled_positions_compile_to_one_graph(kind) -> None:
    rotary = RotaryPositions(16, 1e4, RopeScaling(kind, 4.0, 64))
    x, positions = torch.randn(1, 9, 2, 16), torch.arange(100, 109)[None]
    compiled = torch.compile(rotary, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, positions), rotary(x, positions))
