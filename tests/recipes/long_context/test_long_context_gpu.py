"""Long contexts on an NVIDIA GPU: python -m pytest -m gpu tests/recipes/long_context"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashtrain.models import Decoder, DecoderConfig, RotaryPositions
from flashtrain_recipes.long_context.evaluate import score_windows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def demo(family: str, context: int, attention: str = "flash") -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", family, vocab_size=257, context=context)
    return Decoder(config, attention=attention).cuda()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("stride", [None, 100])
def test_scores_in_bfloat16_are_near_those_of_float32_on_a_cpu(family, stride) -> None:
    windows = torch.randint(0, 257, (3, 1001))
    model = demo(family, 1000)
    options = {"context": 600, "scored": 200, "stride": stride}
    half = score_windows(model, windows, autocast=torch.bfloat16, **options)
    exact = Decoder(model.config, attention="sdpa")
    exact.load_state_dict(model.cpu().state_dict())
    np.testing.assert_allclose(half, score_windows(exact, windows, **options), atol=0.05, rtol=0)


def test_rotary_angles_a_million_tokens_in_are_a_cpus_compiled_or_not() -> None:
    torch.manual_seed(0)
    rotary = RotaryPositions(64)
    x = torch.randn(1, 257, 2, 64)
    positions = torch.arange(2**20 - 257, 2**20, dtype=torch.int32)[None]
    exact = rotary(x.double(), positions)
    for turn in (rotary, torch.compile(rotary)):
        # The float32 frequencies may differ by their last digit: 6e-8 of a million radians.
        torch.testing.assert_close(
            turn(x.cuda(), positions.cuda()).cpu().double(), exact, atol=0.3, rtol=0
        )
        torch.testing.assert_close(
            turn(x.cuda(), positions.cuda()), rotary(x.cuda(), positions.cuda()), atol=0.3, rtol=0
        )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_step_at_a_quarter_of_a_million_tokens_has_finite_gradients(family) -> None:
    model = demo(family, 2**18)
    tokens = torch.randint(0, 257, (1, 2**18), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model.loss(tokens, tokens.roll(-1, 1))
    loss.backward()
    assert 4 < float(loss) < 7
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
