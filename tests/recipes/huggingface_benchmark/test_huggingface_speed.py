"""recipe=hf-speed: implementations on one set of weights, which compute the same;
whole runs, tiny, on a CPU."""

from __future__ import annotations

import time

import pytest
import torch
from jobs import run_job

from flashtrain.command.compose import compose_settings
from flashtrain.integrations.huggingface_config import published_shapes
from flashtrain.report.rows import read_result
from flashtrain.training.hardware import detect_hardware
from flashtrain.training.master_weights import MasterWeights
from flashtrain_recipes.huggingface_benchmark.baselines import everyone
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.baselines.transformers import CHECKPOINTING
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.huggingface_benchmark.run import HuggingFaceSteps
from flashtrain_recipes.step_benchmark.settings import HF_MODELS, LORA

pytestmark = pytest.mark.integration  # whole runs

pytest.importorskip("transformers")
pytest.importorskip("peft")
CPU = torch.device("cpu")
WORDS = ("recipe=hf-speed", "hardware=cpu", "logger=none", "benchmark.contexts=[16]",
         "benchmark.batches=[1,2]",
         "benchmark.rounds=1", "benchmark.steps=1")  # fmt: skip


# Of a hybrid.
SMALL = (
    "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 16, linear_key_head_dim: 8, linear_value_head_dim: 8, "
    "linear_num_key_heads: 2, linear_num_value_heads: 4, vocab_size: 257}"
)


def case_of(model: str, *words: str, weights: str = "fp32") -> HuggingFaceCase:
    return HuggingFaceCase(model, 16, weights, compose_settings([*WORDS, *words]), batch=2)


def uncompiled(*, updates: bool = True) -> list[HuggingFaceBaseline]:
    found = everyone(detect_hardware("cpu"), updates=updates, compiled=False)
    return [one for one in found if not one.compiled]


def names(settings_names: tuple[str, ...]) -> set[str]:
    return {name.removesuffix(LORA) for name in settings_names}


def test_every_name_of_the_settings_is_there() -> None:
    assert names(HF_MODELS) == set(published_shapes())


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        *(("llama-1b", 1.236), ("llama-3b", 3.213), ("llama-8b", 8.030), ("qwen3-8b", 8.191)),
        ("qwen3.5-9b", 8.954),
    ],
)
def test_the_shapes_have_the_published_models_parameters(model: str, billions: float) -> None:
    case = case_of(model)
    assert case._on_meta.parameter_count() / 1e9 == pytest.approx(billions, abs=1e-3)
    # Llama 1B and 3B multiply by their tied table.
    assert case.flops_per_token() > 6e9 * billions * 0.85


@pytest.mark.parametrize("model", ["tiny", "tiny-lora"])
@pytest.mark.parametrize("memory", ["none", "selective"])
def test_all_baselines_have_equal_weights_and_gradients(model: str, memory: str) -> None:
    case = case_of(model, f"memory.activation_checkpointing={memory}")
    tokens, labels = case.draw(CPU, seed=1)
    found = []
    for baseline in uncompiled(updates=False):
        step = baseline.build(case, CPU)
        loss = step(tokens, labels)
        trained = [
            (name.removeprefix("module."), one) for name, one in step.model.named_parameters()
        ]
        found.append((loss, {name: one.grad.clone() for name, one in trained if one.requires_grad}))
        theirs = CHECKPOINTING if baseline.name.startswith("hf") else "selective checkpointing"
        assert baseline.memory(case).words == ("" if memory == "none" else theirs)
    for loss, gradients in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-5, atol=1e-5)
        assert gradients.keys() == found[0][1].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("updates", [True, False])
def test_a_step_updates_the_weights_unless_it_is_to_have_none(updates: bool) -> None:
    words = ("optimizer.learning_rate=0.01", "schedule=constant", "schedule.warmup_steps=0")
    case = case_of("tiny", *words, weights="bf16-master")
    for baseline in uncompiled(updates=updates):
        step = baseline.build(case, CPU)
        assert next(step.model.parameters()).dtype == torch.bfloat16
        losses = [float(step(*case.draw(CPU, seed=0))) for _ in range(4)]
        assert (
            (losses[0] - losses[-1] > 0.01) == updates == isinstance(step.optimizer, MasterWeights)
        )


@pytest.mark.parametrize("model", ["tiny", "qwen3.5-9b"])
def test_packed_rows_are_ours_alone_and_have_the_loss_and_flops_of_their_documents(
    model: str,
) -> None:
    words = [] if model == "tiny" else [f"+model.options={SMALL}"]
    base = compose_settings([*WORDS, *words])
    case = HuggingFaceCase(model, 100, "fp32", base, batch=2, documents=4)
    alone = HuggingFaceCase(model, 100, "fp32", base, batch=2)
    assert [one.name for one in uncompiled() if one.applies(case)] == ["flashtrain"]
    tokens, labels, positions, documents = case.draw(CPU, seed=1)
    lengths = [10, 20, 30, 40]
    assert torch.equal(positions[1], torch.cat([torch.arange(length) for length in lengths]))
    assert torch.equal(documents[1].bincount()[1:], torch.tensor(lengths))
    assert case.columns()["documents"] == 4
    assert case.flops_per_token() == alone._on_meta.flops_per_token(30)  # 3000 / 100
    assert alone.flops_per_token() == alone._on_meta.flops_per_token(100)
    (ours,) = (one for one in uncompiled(updates=False) if one.applies(case))
    loss, step = ours.build(case, CPU)(*case.draw(CPU, seed=1)), ours.build(alone, CPU)
    ends = torch.tensor(lengths).cumsum(0)
    parts = [
        step(*(one[:, end - length : end] for one in (tokens, labels))) * length / 100
        for length, end in zip(lengths, ends.tolist(), strict=True)
    ]
    torch.testing.assert_close(loss, sum(parts), rtol=1e-5, atol=1e-5)


def test_a_run_has_a_row_for_each_implementation_and_batch_and_reports_how_much_faster(
    tmp_path,
) -> None:
    words = [*WORDS, "benchmark.models=[tiny]"]
    assert (
        run_job(compose_settings(words), tmp_path, overrides=words, started=time.monotonic()) == 0
    )
    rows = read_result(tmp_path / "result.json").rows
    measured = [
        (row["implementation"], row["batch"]) for row in rows if row.get("tokens_per_second")
    ]
    assert measured == [
        (name, batch) for batch in (1, 2) for name in ("flashtrain", "transformers, SDPA, eager")
    ]
    assert all(row["over_eager"] > 0 for row in rows if row["implementation"] == "flashtrain")
    (compiled,) = [row for row in rows if not row.get("tokens_per_second")]
    assert "benchmark.compile=true" in compiled["error"]


def test_ratios_are_to_the_fastest_of_each_kind() -> None:
    def row(implementation: str, rate: float | None) -> dict:
        told = {"model": "tiny", "context": 8, "batch": 1, "weights": "fp32"}
        return {**told, "implementation": implementation, "tokens_per_second": rate}

    eager, full = row("transformers, SDPA, eager", 80.0), row("transformers, SDPA, compiled", None)
    layers = row("transformers, SDPA, layers compiled", 100.0)
    ours, (over_eager, over_compiled) = row("flashtrain", 150.0), HuggingFaceSteps.over
    assert over_eager.of(ours, [ours, eager, full, layers]) == {"over_eager": 1.875}
    assert over_compiled.of(ours, [ours, eager, full, layers]) == {"over_compiled": 1.5}
    assert over_compiled.of(ours, [ours, eager, full]) == {"over_compiled": None}
    assert over_eager.of(layers, [eager, layers]) == {}
    packed = {**ours, "documents": 16}  # a row of other work than transformers' of one document
    assert over_eager.of(packed, [eager, packed]) == {"over_eager": None}
