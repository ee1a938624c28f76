"""recipe=hf-speed: implementations on one set of weights, which compute the same;
whole runs, tiny, on a CPU."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

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
from flashtrain_recipes.huggingface_benchmark.baselines.liger import Liger
from flashtrain_recipes.huggingface_benchmark.baselines.transformers import CHECKPOINTING
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.huggingface_benchmark.run import HuggingFaceSteps
from flashtrain_recipes.step_benchmark import master_copies
from flashtrain_recipes.step_benchmark.master_copies import MasterCopies
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
    return [one for one in found if not one.compiled and one.missing(CPU) is None]


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
            (losses[0] - losses[-1] > 0.01)
            == updates
            == isinstance(step.optimizer, MasterWeights | MasterCopies)
        )


@pytest.mark.parametrize("weights", ["fp32", "bf16-master"])
def test_transformers_own_optimizer_updates_the_weights_as_ours(weights: str) -> None:
    words = ("optimizer.learning_rate=0.01", "schedule=constant", "schedule.warmup_steps=0")
    case = case_of("tiny", *words, weights=weights)
    ours, _, theirs = (one.build(case, CPU) for one in uncompiled())
    for seed in range(3):
        batch = case.draw(CPU, seed=seed)
        # bfloat16 is rounded elsewhere in the other program
        close = {} if weights == "fp32" else {"rtol": 0.01, "atol": 0.02}
        torch.testing.assert_close(ours(*batch), theirs(*batch), check_dtype=False, **close)


def test_the_baselines_optimizer_steps_float32_copies_and_rounds_them(monkeypatch) -> None:
    monkeypatch.setattr(master_copies, "_CHUNK", 10)  # three parts: 8; 4 and 6; 20
    torch.manual_seed(0)
    shapes = [(2, 4), (4,), (6,), (4, 5)]
    weights = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    wanted = [one.detach().float().requires_grad_() for one in weights]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours = MasterCopies([{"params": weights}], **options)
    theirs = torch.optim.AdamW(wanted, fused=True, **options)
    for _ in range(5):
        for one, two in zip(weights, wanted, strict=True):
            one.grad = torch.randn(one.shape).bfloat16()
            two.grad = one.grad.float()
        ours.step()
        theirs.step()
        for (weight, copy), two in zip(ours.pairs, wanted, strict=True):
            assert torch.equal(copy, two)
            assert torch.equal(weight, two.bfloat16())
            assert copy.grad is None
        ours.zero_grad()
        assert all(one.grad is None for one in weights)


@pytest.fixture
def liger(monkeypatch):
    """A library that changes models as Liger does: it counts the calls of the functions that it
    puts into transformers' module, and into the model."""
    from transformers.models.llama import modeling_llama

    rotary, calls = modeling_llama.apply_rotary_pos_emb, {"rotary": 0, "loss": 0}

    def counted(name, function):
        def call(*args, **given):
            calls[name] += 1
            return function(*args, **given)

        return call

    def apply(model) -> None:
        modeling_llama.apply_rotary_pos_emb = counted("rotary", rotary)
        model.forward = counted("loss", model.forward)

    found = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply})
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", found)
    return calls


@pytest.mark.parametrize("memory", ["none", "full"])
def test_ligers_functions_compute_its_own_steps_alone(memory: str, liger) -> None:
    case = case_of("tiny", f"memory.activation_checkpointing={memory}")
    batch, before = case.draw(CPU, seed=1), dict(liger)
    options = {"hardware": detect_hardware("cpu"), "updates": True}
    own = Liger("hf-liger-fa4", "Liger", attention="sdpa", **options)
    sdpa = next(one for one in uncompiled() if one.name == "hf-sdpa")
    # built first: what it changes in transformers' module would be all others'
    step, other = own.build(case, CPU), sdpa.build(case, CPU)
    layers = len(step.model.model.layers)
    for _ in range(2):
        before = dict(liger)
        wanted = other(*batch)
        assert liger == before
        torch.testing.assert_close(step(*batch), wanted)
        recomputed = 2 if memory == "full" else 1
        assert liger["rotary"] - before["rotary"] == layers * recomputed
        assert liger["loss"] - before["loss"] == 1


def test_liger_is_left_out_where_it_or_a_gpu_is_missing_or_where_it_does_not_know_the_model(
    liger,
) -> None:
    options = {"hardware": detect_hardware("cpu"), "updates": True}
    own = Liger("hf-liger-fa4", "Liger", **options)
    assert own.missing(CPU) == "needs an NVIDIA GPU"
    assert "flash-attn-4" in own.missing(torch.device("cuda"))
    assert own.refuses(case_of("tiny")) is None
    assert "qwen3" in own.refuses(case_of("qwen3-8b"))


def test_weights_of_the_baseline_under_autocast_are_float32_whatever_the_cases_are(liger) -> None:
    case = case_of("tiny", weights="bf16-master")
    found = everyone(detect_hardware("cpu"), updates=True, compiled=False)
    own = next(one for one in found if one.name == "hf-liger-fa4-autocast")
    own.attention = "sdpa"
    step = own.build(case, CPU)
    assert torch.isfinite(step(*case.draw(CPU, seed=0)))
    assert {one.dtype for one in step.model.parameters()} == {torch.float32}
    assert type(step.optimizer) is torch.optim.AdamW
    assert own.columns(case)["weights"] == "fp32"


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
    liger, compiled = [row for row in rows if not row.get("tokens_per_second")]
    assert "benchmark.compile=true" in compiled["error"]
    assert liger["error"] == "needs an NVIDIA GPU"


def test_ratios_are_to_the_fastest_of_each_kind() -> None:
    def row(implementation: str, rate: float | None) -> dict:
        told = {"model": "tiny", "context": 8, "batch": 1, "weights": "fp32"}
        return {**told, "implementation": implementation, "tokens_per_second": rate}

    eager, full = row("transformers, SDPA, eager", 80.0), row("transformers, SDPA, compiled", None)
    layers = row("transformers, SDPA, layers compiled", 100.0)
    liger = row("transformers, Liger, flash-attn-4, eager", 120.0)
    ours, (over_eager, over_compiled, over_liger) = row("flashtrain", 150.0), HuggingFaceSteps.over
    assert over_eager.of(ours, [ours, eager, full, layers]) == {"over_eager": 1.875}
    assert over_compiled.of(ours, [ours, eager, full, layers]) == {"over_compiled": 1.5}
    assert over_compiled.of(ours, [ours, eager, full]) == {"over_compiled": None}
    assert over_eager.of(layers, [eager, layers]) == {}
    other = row("transformers, Liger, flash-attn-4, layers compiled", 160.0)
    assert over_liger.of(ours, [ours, eager, liger, other]) == {"over_liger": 1.25}
    assert over_liger.of(other, [ours, liger, other]) == {}
    assert over_eager.of(liger, [eager, liger]) == {"over_eager": 1.5}
    packed = {**ours, "documents": 16}  # a row of other work than transformers' of one document
    assert over_eager.of(packed, [eager, packed]) == {"over_eager": None}


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny", "tiny-lora"])
def test_on_a_gpu_ligers_step_is_that_of_transformers_with_sdpa(model: str) -> None:
    pytest.importorskip("liger_kernel")
    pytest.importorskip("flash_attn.cute")
    device = torch.device("cuda")
    base = compose_settings(["recipe=hf-speed", "logger=none"])
    case = HuggingFaceCase(model, 512, "bf16-master", base, batch=2)
    batch = case.draw(device, seed=1)
    found = {one.name: one for one in everyone(detect_hardware(), updates=False, compiled=False)}
    step, wanted = (found[name].build(case, device) for name in ("hf-liger-fa4", "hf-sdpa"))
    torch.testing.assert_close(
        step(*batch), wanted(*batch), rtol=2e-3, atol=2e-3, check_dtype=False
    )
    for one, two in zip(step.model.parameters(), wanted.model.parameters(), strict=True):
        if two.grad is not None:
            error = (one.grad.float() - two.grad.float()).norm()
            assert error <= 0.05 * two.grad.float().norm() + 1e-6
