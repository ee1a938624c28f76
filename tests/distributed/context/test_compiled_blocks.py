"""torch.compile where devices share sequences: the parts around attention, once for all batches and layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import strategy_ranks
import torch
from strategy_ranks import CONTEXT, VOCABULARY, Loaders, trainer
from unshared_models import OfTransformers

import flashtrain
from flashtrain.distributed.context.ulysses import Ulysses
from flashtrain.integrations import register_with_transformers
from flashtrain.models import GPT2, GPT2Config, MemorySavings
from flashtrain.tasks import LanguageModel

LAYERS, STEPS = 2, 3


class Record(pl.Callback):
    """Losses, and how many frames dynamo had compiled after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.frames: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))
        self.frames.append(torch._dynamo.utils.counters["frames"]["ok"])


def trained(folder: Path, kind: str, compiled: bool) -> Record:
    """A few steps on one rank of batches that differ in documents, and so in mask and layout."""
    torch.manual_seed(2)
    config = GPT2Config.of_size("demo", "llama", vocab_size=VOCABULARY, context=CONTEXT)
    model = GPT2(replace(config, layers=LAYERS, embed=32, ffn=48, heads=4, kv_heads=2))
    model.save_memory(MemorySavings(kind))
    record = Record()
    one = flashtrain.ContextParallelStrategy(method="ring", timeout_seconds=None)
    fit = trainer(folder, max_steps=STEPS, devices=1, strategy=one, callbacks=[record])
    try:
        fit.fit(LanguageModel(model, document_mask=True, compile=compiled), Loaders(40))
    finally:
        torch.distributed.destroy_process_group()
    return record


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "calls_a_layer"), [("none", 1), ("selective", 1), ("full", 2)])
def test_blocks_compile_around_attention_and_a_new_batch_compiles_nothing(kind, calls_a_layer, monkeypatch, tmp_path):
    strategy_ranks.quiet()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    calls = []
    forward = Ulysses.forward
    monkeypatch.setattr(Ulysses, "forward", lambda *given: (calls.append(1), forward(*given))[1])
    expected = trained(tmp_path, kind, compiled=False).losses
    compile_ = torch.compile

    def eager(function, **options):
        assert options == {"dynamic": False, "fullgraph": False}
        assert function.__name__ == "compute"
        return compile_(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", eager)
    with torch._dynamo.config.patch(error_on_recompile=True):  # the second layer is the first's code, too
        found = trained(tmp_path, kind, compiled=True)
    assert found.losses == pytest.approx(expected, rel=1e-6)
    assert found.frames[0] > 0
    assert found.frames == [found.frames[0]] * STEPS
    assert len(calls) == 2 * STEPS * LAYERS * calls_a_layer  # selective checkpointing computes attention once


@pytest.mark.slow
def test_layers_of_a_transformers_model_compile_around_attention(tmp_path):
    strategy_ranks.quiet()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    def steps(compiled: bool) -> Record:
        torch.manual_seed(3)
        model = OfTransformers(register_with_transformers())
        for layer in model.model.model.layers:
            if compiled:
                layer.compile(backend="aot_eager")
        record = Record()
        one = flashtrain.ContextParallelStrategy(method="ring", timeout_seconds=None)
        task = strategy_ranks.of(model, strategy_ranks.PlainTask())
        try:
            trainer(tmp_path, max_steps=STEPS, devices=1, strategy=one, callbacks=[record]).fit(task, Loaders(40))
        finally:
            torch.distributed.destroy_process_group()
        return record

    expected = steps(compiled=False).losses
    found = steps(compiled=True)
    assert found.losses == pytest.approx(expected, rel=1e-6)
    assert found.frames[0] > 0
    assert found.frames == [found.frames[0]] * STEPS
