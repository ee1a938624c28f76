"""BERT: padded and packed are one model, and nothing but real tokens counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from bert_batches import VOCABULARY, batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.errors import UserError
from flashtrain.models import Attention, Bert, BertConfig, MemorySavings
from flashtrain_kernels import dispatch

LENGTHS = [5, 1, 9, 3]


def build(family: str = "bert", attention: str = "sdpa", **options) -> Bert:
    torch.manual_seed(0)
    config = BertConfig.of_size("tiny", family, vocab_size=VOCABULARY, context=32, **options)
    return Bert(config, attention).double()


def loss_and_gradients(model: Bert, arguments: dict, loss=None) -> list[torch.Tensor]:
    model.zero_grad()
    value = (loss or model.loss)(**arguments)
    value.backward()
    return [
        value.detach(),
        *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()),
    ]


def furthest(ones, others) -> float:
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("attention", ["flash", "sdpa", "standard"])
@pytest.mark.parametrize("family", ["bert", "modern"])
def test_padded_and_packed_give_one_loss_and_one_gradient(family, attention):
    model = build(family, attention)
    padded, packed = batch_of(LENGTHS)
    assert furthest(loss_and_gradients(model, padded), loss_and_gradients(model, packed)) < 1e-10


@pytest.mark.parametrize("family", ["bert", "modern"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_kernels_mask_keeps_packed_sequences_apart_and_drops_the_same_weights(family, dropout):
    """What a GPU runs, its operators' reference in place of the kernels."""
    model = build(family, "flash")
    for module in model.modules():
        if isinstance(module, Attention):
            module.dropout = dropout
    padded, packed = batch_of(LENGTHS)
    results = []
    with dispatch.force("reference"):
        for layout in (padded, packed):
            torch.manual_seed(3)
            results.append(loss_and_gradients(model, layout))
    assert furthest(*results) < 1e-10
    if not dropout:
        assert furthest(results[0], loss_and_gradients(model, packed)) < 1e-10


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), spare=st.integers(1, 5))
def test_whatever_the_lengths_packed_sequences_are_scored_as_each_alone(lengths, spare):
    model = build()
    padded, packed = batch_of(lengths, spare=spare)
    with torch.no_grad():
        alone = [
            model.loss(
                padded["tokens"][row : row + 1, :length],
                torch.tensor([length // 2]),
                padded["labels"][row : row + 1],
                segments=padded["segments"][row : row + 1, :length],
            ).item()
            for row, length in enumerate(lengths)
        ]
        assert model.loss(**packed).item() == pytest.approx(sum(alone) / len(alone), abs=1e-10)


def test_the_loss_is_the_mean_cross_entropy_of_the_logits_at_the_labels():
    model = build()
    torch.nn.init.normal_(model.masked_head.bias)
    _, packed = batch_of(LENGTHS)
    layout = {name: packed[name] for name in ("segments", "cu_seqlens")}
    logits = model(packed["tokens"], **layout)
    assert torch.isneginf(logits[:, VOCABULARY:]).all()
    exact = F.cross_entropy(logits[packed["masked"]][:, :VOCABULARY], packed["labels"])
    assert model.loss(**packed).item() == pytest.approx(exact.item(), abs=1e-10)
    score = model.score(**packed)
    assert (score.loss_sum / score.labels).item() == pytest.approx(exact.item(), abs=1e-10)
    assert score.labels == 4
    best = logits[packed["masked"]].argmax(-1)
    assert score.correct == (best == packed["labels"]).sum()
    assert model.score(**{**packed, "labels": best}).correct == len(best)


def test_a_given_count_of_labels_makes_the_mean_over_micro_batches_that_of_the_step():
    model = build()
    one, other = batch_of([5, 9]).packed, batch_of([3, 4, 2]).packed
    share = torch.tensor(5 / 2)
    mean = (model.loss(**one, label_count=share) + model.loss(**other, label_count=share)) / 2
    scores = [model.score(**batch) for batch in (one, other)]
    assert mean.item() == pytest.approx(sum(s.loss_sum.item() for s in scores) / 5, abs=1e-10)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("attention", ["flash", "sdpa", "standard"])
def test_a_packed_row_has_no_score_matrix_of_its_own(attention):
    model = build(attention=attention)
    _, packed = batch_of([30] * 40)
    tokens = len(packed["tokens"])
    with Largest() as largest:
        model.loss(**packed).backward()
    assert largest.elements < tokens**2
    assert largest.elements <= tokens * 4 * model.config.embed  # the feed-forward's inside


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "modern"])
def test_batches_of_other_lengths_are_compiled_once(family):
    model = build(family, "flash")
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model.loss, fullgraph=True, dynamic=False, backend=count)
    for lengths in (LENGTHS, [2, 2, 2, 12], [6, 6, 5, 1]):
        packed = batch_of(lengths).packed
        assert (
            furthest(loss_and_gradients(model, packed, compiled), loss_and_gradients(model, packed))
            < 1e-10
        )
    assert len(graphs) == 1


@pytest.mark.parametrize("family", ["bert", "modern"])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_memory_savings_leave_losses_and_gradients(family, checkpointing):
    model = build(family)
    _, packed = batch_of(LENGTHS)
    before = loss_and_gradients(model, packed)
    model.save_memory(MemorySavings(checkpointing, ffn_chunk=4, loss_chunk=2))
    assert furthest(before, loss_and_gradients(model, packed)) < 1e-10


def test_without_labels_the_loss_is_zero_and_nothing_is_learned():
    model = build()
    _, packed = batch_of(LENGTHS)
    loss, *gradients = loss_and_gradients(
        model, {**packed, "labels": torch.full_like(packed["labels"], -100)}
    )
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(("size", "millions"), [("tiny", 4.4), ("base", 109.5), ("large", 335.1)])
def test_the_sizes_have_the_parameters_of_the_published_models(size, millions):
    with torch.device("meta"):
        model = Bert(
            replace(BertConfig.of_size(size, vocab_size=30522, vocab_rows=30522), pooler=True)
        )
    encoder = sum(p.numel() for part in (model.encoder, model.pooler) for p in part.parameters())
    assert encoder / 1e6 == pytest.approx(millions, abs=0.06)


def test_a_modern_bert_of_a_size_has_about_as_many_weights_in_its_blocks():
    with torch.device("meta"):
        models = [
            Bert(BertConfig.of_size("large", family, vocab_size=30522))
            for family in ("bert", "modern")
        ]
    counts = [sum(p.numel() for p in model.encoder.blocks.parameters()) for model in models]
    assert counts[0] == pytest.approx(counts[1], rel=0.02)


def test_flops_count_real_tokens_pairs_and_labels():
    config = BertConfig.of_size("large", vocab_size=30522)
    weights = 24 * 12 * 1024**2
    assert config.flops([512]) == pytest.approx(6 * weights * 512 + 12 * 24 * 1024 * 512**2)
    assert config.flops([128] * 4) < config.flops([512])
    assert config.flops([512], masked=77) - config.flops([512]) == pytest.approx(
        77 * 6 * (1024**2 + 1024 * 30522)
    )
    assert config.flops([100, 400]) == pytest.approx(config.flops([100]) + config.flops([400]))


def test_positions_past_the_context_are_refused():
    encoder, tokens = build().encoder, torch.zeros(40, dtype=torch.int64)
    with pytest.raises(UserError, match="40 positions for a model with 32"):
        encoder(tokens[None])
    with pytest.raises(UserError, match="40 positions for a model with 32"):
        encoder(tokens, cu_seqlens=torch.tensor([0, 40]).int())


@pytest.mark.parametrize("family", ["bert", "modern"])
def test_on_the_meta_device_a_packed_row_has_a_loss_and_gradients(family):
    with torch.device("meta"):
        model = build(family, "flash")
        row, ends = torch.zeros(24, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
        loss = model.loss(row, row[:4], row[:4], cu_seqlens=ends)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert loss.is_meta
    assert loss.shape == ()
    assert {None if x is None else x.device.type for x in gradients} <= {"meta", None}
