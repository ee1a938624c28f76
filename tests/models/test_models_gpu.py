"""The models on an NVIDIA GPU: python -m pytest -m gpu tests/models/test_models_gpu.py"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.models import Decoder, DecoderConfig, MemorySavings
from flashtrain_kernels import masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

S = 300
FAMILIES = ["gpt2", "llama"]


class Counted(TorchDispatchMode):
    """Counts the calls of each of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashtrain_kernels":
            name = func.name().split("::")[1]
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def build(family: str, attention: str, dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size("demo", family, vocab_size=50, context=S, dropout=dropout)
    return Decoder(config, attention=attention).cuda()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (2, S), generator=generator)
    documents = (torch.rand(2, S, generator=generator) < 0.02).cumsum(1)
    return tokens.cuda(), documents.cuda()


def loss_and_gradients(model, loss, precision, mask):
    tokens, _ = batch()
    torch.manual_seed(2)
    model.zero_grad()
    with torch.autocast("cuda", dtype=precision) if precision is not None else nullcontext():
        value = loss(tokens, tokens.roll(-1, 1), mask=mask)
    value.backward()
    return [value.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_near(ours, exact, tolerance):
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).norm() <= tolerance * other.norm() + 1e-6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [(None, 5e-3), (torch.bfloat16, 4e-2)])
def test_flash_gives_the_loss_and_gradients_of_standard_attention(
    family, packed, precision, tolerance
):
    mask = masks.document(batch()[1], causal=True) if packed else None
    model, exact = build(family, "flash"), build(family, "standard")
    ours = loss_and_gradients(model, model.loss, precision, mask)
    assert_near(ours, loss_and_gradients(exact, exact.loss, None, mask), tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_compiled_loss_of_packed_documents_is_the_eager_one(family, precision, dropout):
    torch.compiler.reset()
    model = build(family, "flash", dropout)
    mask = masks.document(batch()[1], causal=True)
    eager = loss_and_gradients(model, model.loss, precision, mask)
    # aot_eager, since inductor draws nn.Dropout's numbers in another way.
    backend = "inductor" if dropout == 0 else "aot_eager"
    compiled = torch.compile(model.loss, dynamic=False, fullgraph=True, backend=backend)
    assert_near(
        loss_and_gradients(model, compiled, precision, mask),
        eager,
        4e-2 if precision is not None else 5e-3,
    )


@pytest.mark.longest
@pytest.mark.parametrize("family", FAMILIES)
def test_with_dropout_the_loss_compiles_with_inductor(family):
    torch.compiler.reset()
    model = build(family, "flash", 0.2)
    compiled = torch.compile(model.loss, dynamic=False, fullgraph=True)
    mask = masks.document(batch()[1], causal=True)
    first, *_ = loss_and_gradients(model, compiled, torch.bfloat16, mask)
    again, *_ = loss_and_gradients(model, compiled, torch.bfloat16, mask)
    assert first == again
    assert first.item() == pytest.approx(
        loss_and_gradients(model, model.loss, None, mask)[0].item(), rel=0.02
    )


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_mask_is_planned_once_for_the_forward_and_backward_of_all_layers(precision, dropout):
    model = build("llama", "flash", dropout)
    mask = masks.document(batch()[1], causal=True)
    with Counted() as counted:
        loss_and_gradients(model, model.loss, precision, mask)
    assert counted.calls["plan"] == 1
    assert counted.calls["forward"] == len(model.blocks)


# --- memory savings -------------------------------------------------------------------------------

SAVINGS = {
    "selective": MemorySavings("selective"),
    "full": MemorySavings("full", ffn_chunk=128),
    "offload": MemorySavings("full", offload=True, ffn_chunk=128),
}


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", SAVINGS)
def test_memory_savings_give_the_same_loss_and_gradients(name, dropout, attention):
    model = build("gpt2", attention, dropout)
    exact = loss_and_gradients(model, model.loss, torch.bfloat16, None)
    model.save_memory(SAVINGS[name])
    assert_near(loss_and_gradients(model, model.loss, torch.bfloat16, None), exact, 4e-2)


@pytest.mark.longest
@pytest.mark.parametrize("name", SAVINGS)
def test_memory_savings_compile_with_inductor(name):
    torch.compiler.reset()
    model = build("gpt2", "flash")
    exact = loss_and_gradients(model, model.loss, torch.bfloat16, None)
    model.save_memory(SAVINGS[name])
    if SAVINGS[name].checkpointing == "full":  # as a run does
        model.compile_blocks(dynamic=False, fullgraph=True)
        loss = model.loss
    else:
        loss = torch.compile(model.loss, dynamic=False, fullgraph=True)
    assert_near(loss_and_gradients(model, loss, torch.bfloat16, None), exact, 4e-2)


@pytest.mark.longest
@pytest.mark.parametrize("compiled", [False, True])
def test_each_kind_needs_less_memory_than_the_one_before(compiled):
    config = DecoderConfig.of_size("124m", vocab_size=512, context=32768)
    torch.manual_seed(0)
    model = Decoder(config, attention="flash").cuda()
    tokens = torch.randint(0, 512, (1, 32768), device="cuda")
    ladder = [MemorySavings(), *(MemorySavings(kind) for kind in ("selective", "full"))]
    ladder += [MemorySavings("full", ffn_chunk=2048), MemorySavings("full", True, ffn_chunk=2048)]
    peaks = []
    for savings in ladder:
        torch.compiler.reset()
        model.save_memory(savings)
        loss = model.loss
        if compiled and savings.checkpointing == "full":
            model.compile_blocks(dynamic=False)  # as a run does
        elif compiled:
            loss = torch.compile(loss, dynamic=False)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                value = loss(tokens, tokens)
            value.backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks == sorted(peaks, reverse=True), peaks
    assert peaks[2] < 0.5 * peaks[0], peaks
