"""TransNormer's claim (Qin et al. 2022, section 3.1) in training: the gradients of attention with a
denominator, 1 + elu's, grow large; those of NormAttention stay bounded.

    python tests/models/test_transnormer_training.py [SIZE CONTEXT BATCH]    prints what was found
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.state_mixer import StateMixer
from flashtrain_kernels.recurrences import decayed_sum

STEPS, WARMUP, RATE = 500, 50, 3e-3


class DividedMixer(StateMixer):
    """Linear attention with 1 + elu and its denominator, without a norm."""

    def read(self, x: Tensor, rates: Tensor, positions: object, rows: object) -> Tensor:
        q, k, v = (one.unflatten(2, (self.spec.heads, -1)) for one in x.chunk(3, 2))
        q, k = 1 + F.elu(q), 1 + F.elu(k)
        # A further column of ones sums the scores; torch's recurrence takes any width.
        wide = F.pad(v, (0, 1), value=1.0).float()
        found = decayed_sum(wide, 0 * wide[..., 0], k.float(), q.float(), rows)
        return (found[..., :-1] / found[..., -1:]).to(x.dtype)


def library() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def trained(divided: bool, size: str, context: int, batch: int, **sizes: int) -> dict[str, float]:
    """Largest and median gradient norm of the late half's attention after the warm-up, and the mean
    loss of the last 50 steps."""
    device, text = "cuda" if torch.cuda.is_available() else "cpu", library()
    torch.manual_seed(0)
    config = DecoderConfig.of_size(size, "transnormer", vocab_size=256, context=context, **sizes)
    model = Decoder(config, attention="flash" if device == "cuda" else "sdpa").to(device).train()
    late = [block.mixer for block in model.blocks if isinstance(block.mixer, StateMixer)]
    for mixer in late if divided else []:
        mixer.__class__, mixer.norm = DividedMixer, torch.nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    norms, losses = [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARMUP) * (1 - step / STEPS)
        begins = torch.randint(len(text) - context - 1, (batch,), generator=generator)
        rows = torch.stack([text[at : at + context + 1] for at in begins]).long().to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model.loss(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norms.append(max(mixer.inputs.weight.grad.norm() for mixer in late).item())
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    later = torch.tensor(norms[WARMUP:])
    found = {"largest": later.max().item(), "median": later.median().item()}
    return {**found, "loss": sum(losses[-50:]) / 50}


@pytest.mark.slow
def test_the_largest_gradient_of_norm_attention_over_500_steps_is_below_that_of_1_plus_elu():
    sizes = {"layers": 2, "width": 64, "heads": 2}
    norm, divided = (trained(one, "demo", 128, 4, **sizes) for one in (False, True))
    assert norm["largest"] < divided["largest"]
    assert norm["loss"] < 3.2  # both learn
    assert divided["loss"] < 3.2


if __name__ == "__main__":
    size, context, batch = sys.argv[1:] or ("demo", "128", "4")
    for divided in (False, True):
        name = "1 + elu" if divided else "NormAttention"
        print(name, trained(divided, size, int(context), int(batch)), flush=True)
