"""What a run of devices that share each sequence is planned to hold, send and take, on
machines that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quick_settings import settings_of

from flashtrain.errors import UserError
from flashtrain.run import machine
from flashtrain.run.machine import adapt_to_machine
from flashtrain.settings.command_line import CommandLine
from flashtrain.tasks.batching import Batching, choose_batching
from flashtrain.tasks.context_run import check_model, context_columns, exchange_bytes_of
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.language.plan import describe
from flashtrain.tasks.language.plan import plan_language as plan
from flashtrain.tasks.optimization import optimizer_builder
from flashtrain.training.hardware import Hardware
from flashtrain.training.master_weights import MasterWeights
from flashtrain.training.memory import FREE_SHARE, GIB

H200 = Hardware(
    "cuda", "NVIDIA H200", 8, (9, 0), 139 * GIB, 139 * GIB, 989e12, "bf16-mixed", "flash", 960 * GIB
)  # fmt: skip
MILLION = 1_048_576


def one_sequence(context: int, *words: str):
    words = (f"context={context}", f"trainer.tokens_per_step={context}", *words)
    return settings_of("trainer.devices=8", "model.positions=rotary", *words)


def model_of(settings):
    with torch.device("meta"):
        return make_model(
            settings.model, vocab_size=50257, context=settings.context, attention="flash"
        )


def batching(settings) -> Batching:
    return choose_batching(settings, H200, model_of(settings))


def test_a_device_keeps_its_share_of_the_activations_and_of_the_weights():
    alone = batching(
        one_sequence(131072, "memory.activation_checkpointing=selective", "trainer.devices=1")
    ).estimate
    shared = batching(
        one_sequence(131072, "context_parallel=8", "memory.activation_checkpointing=selective")
    ).estimate
    assert shared.activations == pytest.approx(alone.activations / 8)
    assert shared.optimizer == pytest.approx(alone.optimizer / 8, rel=1e-2)
    assert shared.exchange > 0
    assert shared.block >= shared.exchange
    assert alone.exchange == 0


def test_micro_batches_are_of_the_samples_that_a_group_of_devices_takes():
    found = batching(settings_of("trainer.devices=8", "context_parallel=4"))
    assert found.micro_batch * found.accumulate == 32  # 64 samples over two groups


def test_a_million_tokens_fit_eight_devices_for_124m_and_1_3b():
    for size in ("124m", "1.3b"):
        found = batching(
            one_sequence(MILLION, "trainer.strategy=context_parallel", f"model.size={size}")
        )
        assert found.fits
        assert found.estimate.total <= FREE_SHARE * H200.total_memory_bytes


def test_only_gathering_needs_memory_for_the_whole_sequence():
    """Twice the sequence on twice the devices: what a device holds of it stays the same."""

    def exchange(way: str, devices: int, context: int) -> int:
        words = (
            f"trainer.devices={devices}",
            "trainer.strategy=context_parallel",
            f"trainer.context_parallel_method={way}",
        )
        settings = settings_of("model=llama", "model.size=355m", f"context={context}", *words)
        shape = model_of(settings).config
        return exchange_bytes_of(settings.sharding, "bf16-mixed", shape, 1)["exchange"]

    masks = 48 * MILLION  # of the whole sequence under every way
    # ulysses: on 4 devices two of four pieces of a device's heads are in memory, on 8 two of two.
    for way, larger in (("ring", 1.0), ("ulysses", 2.1), ("all-gather", 2.0)):
        few, many = exchange(way, 4, MILLION), exchange(way, 8, 2 * MILLION)
        assert (many - 2 * masks) / (few - masks) == pytest.approx(larger, rel=0.3), way


def test_the_plan_names_the_mesh_the_way_its_reason_the_layout_and_what_is_sent():
    lines = plan(one_sequence(MILLION, "context_parallel=8"), H200).splitlines()
    assert any(
        line.startswith("devices: 1 (data) x 8 (context); weights, gradients") for line in lines
    )
    assert any(
        line.startswith("context-parallel method: hybrid: 12 heads over 4 ranks x rings of 2")
        for line in lines
    )
    assert any(
        "a device sends 960.00 MiB forward and 2.25 GiB backward for each of 12 layers" in line
        for line in lines
    )
    (layout,) = [
        line for line in lines if line.startswith("layout: balanced, 131,072 tokens a device")
    ]
    assert "attends 1.00 times the mean" in layout
    assert any(line.startswith("memory: ") and "of it exchanged" in line for line in lines)


def test_planned_documents_are_counted_with_room_for_unequal_devices():
    words = "context_parallel=8", "memory.activation_checkpointing=full", "data.document_mask=true"
    fixed = one_sequence(MILLION, *words)
    planned = one_sequence(MILLION, *words, "trainer.context_parallel_groups=planned")
    activations = [batching(one).estimate.activations for one in (fixed, planned)]
    assert activations[1] == pytest.approx(1.25 * activations[0], rel=0.01)
    lines = plan(planned, H200).splitlines()
    assert any("a device holds at most 163,840 tokens" in line for line in lines)
    # Groups of few devices are not divided further.
    assert any(line.startswith("context-parallel method: ring") for line in lines)
    assert any("documents planned over 8 devices" in line for line in lines)


def test_the_line_before_training_and_the_row_after_it_name_degree_and_way():
    settings = settings_of("trainer.devices=4", "context_parallel=4")
    model = model_of(settings)
    line = describe(settings, H200, model, choose_batching(settings, H200, model))
    assert "micro-batch 64, each sequence over 4 devices (ulysses)" in line
    assert context_columns(settings.sharding, "bf16-mixed", model, 64) == {
        "context_parallel": 4,
        "context_method": "ulysses",
    }
    assert context_columns(settings_of().sharding, "bf16-mixed", model, 1) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("trainer.context_parallel_method=ulysses",),
            r"ulysses with 12 heads on 8 ranks\. Use .* 2, 3, 4, 6, 12\)",
        ),
        (
            ("trainer.context_parallel_method=hybrid", "model.size=1.5b"),
            "hybrid with 25 heads on 8 ranks. Use all-gather or ring, or another",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_before_any_text_is_read(monkeypatch, words, message):
    monkeypatch.setattr(machine, "detect_hardware", lambda accelerator: H200)
    with pytest.raises(UserError, match=message):
        adapt_to_machine(
            one_sequence(8192, "trainer.strategy=context_parallel", *words), CommandLine()
        )


def test_a_model_whose_attention_cannot_be_shared_is_refused():
    settings = settings_of("model=plain", "trainer.devices=2", "trainer.strategy=context_parallel")
    with pytest.raises(
        UserError, match=r"model=plain .* has no flashtrain\.Attention.* Use model=gpt2, llama"
    ):
        check_model(settings.sharding, model_of(settings), settings.model.name)


def test_a_cpu_computes_the_same_attention_and_an_old_gpu_is_refused(monkeypatch):
    settings = settings_of("trainer.devices=2", "trainer.strategy=context_parallel")
    cpu = Hardware("cpu", "a CPU", 2, None, 2**34, 2**34, None, "32-true", "sdpa")
    monkeypatch.setattr(machine, "detect_hardware", lambda accelerator: cpu)
    assert adapt_to_machine(settings, CommandLine())[1].attention == "flash"
    old = replace(
        H200, name="Tesla V100", capability=(7, 0), attention="sdpa", precision="16-mixed"
    )
    monkeypatch.setattr(machine, "detect_hardware", lambda accelerator: old)
    with pytest.raises(
        UserError, match=r"needs attention=flash.* Tesla V100 \(sm_70\)\. Use trainer\.strategy=ddp"
    ):
        adapt_to_machine(settings, CommandLine())


def test_sharded_weights_have_no_float32_copies():
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    assert isinstance(
        optimizer_builder(settings_of().optimizer, sharded=False)(half), MasterWeights
    )
    shared = settings_of("trainer.devices=2", "context_parallel=2")
    assert not isinstance(
        optimizer_builder(shared.optimizer, sharded=shared.shards_weights)(half), MasterWeights
    )
