"""torch.compile where devices share sequences: the parts around attention, once for
all batches and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import strategy_ranks
import torch
from strategy_ranks import CONTEXT, VOCABULARY, Loaders, Losses, trainer
from unshared_models import OfTransformers

import flashtrain
from flashtrain.distributed.context.ring import Ring
from flashtrain.integrations import register_with_transformers
from flashtrain.models import Decoder, DecoderConfig, MemorySavings
from flashtrain.tasks import LanguageModel

LAYERS, STEPS = 2, 3
pytestmark = pytest.mark.slow


class Record(Losses):
    """Losses, and how many frames dynamo had compiled after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[int] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.frames.append(torch._dynamo.utils.counters["frames"]["ok"])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    strategy_ranks.quiet()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def trained(folder: Path, task: pl.LightningModule) -> Record:
    """A few steps on one rank of batches that differ in documents, and so in mask and layout."""
    record = Record()
    one = flashtrain.ContextParallelStrategy(method="ring", timeout_seconds=None)
    try:
        trainer(folder, max_steps=STEPS, devices=1, strategy=one, callbacks=[record]).fit(
            task, Loaders(40)
        )
    finally:
        torch.distributed.destroy_process_group()
    return record


def check_compiled(folder: Path, task: Callable[[bool], pl.LightningModule]) -> None:
    """A new batch compiles nothing; losses stay."""
    expected, record = trained(folder, task(False)).found, trained(folder, task(True))
    assert record.found == pytest.approx(expected, rel=1e-6)
    assert record.frames[0] > 0
    assert record.frames == [record.frames[0]] * STEPS


@pytest.mark.parametrize(("kind", "calls_a_layer"), [("none", 1), ("selective", 1), ("full", 2)])
def test_blocks_compile_around_attention_and_a_new_batch_compiles_nothing(
    kind, calls_a_layer, monkeypatch, tmp_path
):
    calls = []
    forward, compile_ = Ring.forward, torch.compile
    monkeypatch.setattr(Ring, "forward", lambda *given: (calls.append(1), forward(*given))[1])

    def eager(function, **options):
        assert options == {"dynamic": False, "fullgraph": False}
        assert function.__name__ == "compute"
        return compile_(function, backend="aot_eager", **options)

    def task(compiled: bool) -> pl.LightningModule:
        torch.manual_seed(2)
        config = DecoderConfig.of_size("demo", "llama", vocab_size=VOCABULARY, context=CONTEXT)
        model = Decoder(config.changed(layers=LAYERS, embed=32, ffn=48, heads=4, kv_heads=2))
        model.save_memory(MemorySavings(kind))
        return LanguageModel(model, document_mask=True, compile=compiled)

    monkeypatch.setattr(torch, "compile", eager)
    # The second layer is the first's code, too.
    with torch._dynamo.config.patch(error_on_recompile=True):
        check_compiled(tmp_path, task)
    # selective checkpointing computes attention once.
    assert len(calls) == 2 * STEPS * LAYERS * calls_a_layer


def test_layers_of_a_transformers_model_compile_around_attention(tmp_path):
    def task(compiled: bool) -> pl.LightningModule:
        torch.manual_seed(3)
        model = OfTransformers(register_with_transformers())
        for layer in model.model.model.layers:
            if compiled:
                layer.compile(backend="aot_eager")
        return strategy_ranks.of(model, strategy_ranks.PlainTask())

    check_compiled(tmp_path, task)
