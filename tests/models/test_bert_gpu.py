"""BERT on an NVIDIA GPU: python -m pytest -m gpu tests/models/test_bert_gpu.py"""

from __future__ import annotations

import pytest
import torch
from bert_batches import VOCABULARY, batch_of

from flashtrain.models import Bert, BertConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [300, 7, 128, 1, 64, 200]


def build(family: str, attention: str) -> Bert:
    torch.manual_seed(0)
    config = BertConfig.of_size("tiny", family, vocab_size=VOCABULARY, context=300)
    return Bert(config, attention).cuda()


def results(model: Bert, arguments: dict, loss=None, half: bool = True) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        value = (loss or model.loss)(**arguments)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_near(ours, exact, tolerance: float) -> None:
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).norm() <= tolerance * other.norm() + 1e-3 * tolerance


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "modern"])
def test_padded_and_packed_agree_to_the_precision(family, attention):
    padded, packed = batch_of(LENGTHS, device="cuda")
    exact = results(build(family, "standard"), padded, half=False)
    model = build(family, attention)
    for layout in (padded, packed):
        assert_near(results(model, layout), exact, 0.06)


@pytest.mark.parametrize("family", ["bert", "modern"])
def test_a_compiled_packed_loss_is_the_eager_one(family):
    _, packed = batch_of(LENGTHS, device="cuda")
    model = build(family, "flash")
    compiled = torch.compile(model.loss, fullgraph=True, dynamic=False)
    assert_near(results(model, packed, compiled), results(model, packed), 0.06)


def test_a_packed_row_needs_memory_for_its_tokens_and_no_matrix_of_them():
    model = build("bert", "flash")
    # 65,536 tokens: a matrix of booleans would be 4 GiB.
    _, packed = batch_of([256] * 256, device="cuda")
    results(model, packed)
    torch.cuda.reset_peak_memory_stats()
    results(model, packed)
    assert torch.cuda.max_memory_allocated() < 2**31
