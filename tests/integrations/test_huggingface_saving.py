"""model.save() of a transformers model: what is written, and that the model
itself stays as it was."""

from __future__ import annotations

from pathlib import Path

import huggingface_models as tiny
import pytest
import torch
import transformers
from hybrid_models import CONFIGS, LENGTHS, hybrid

from flashtrain.integrations.huggingface_adapter import adapter_weights
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_model import transformers_decoder
from flashtrain.models.activation_checkpointing import MemorySavings

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}
CPU = torch.device("cpu")
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def origin(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **{**tiny.LLAMA_LIKE, **(EXPERTS if kind == "mixtral" else {})}
    )
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


def adapted(path: Path | None, precision: str) -> HuggingFaceDecoder:
    """A model with adapters that a training in this precision has changed."""
    given = (
        {"path": str(path)} if path is not None else {"config": "llama", "changes": tiny.LLAMA_LIKE}
    )
    model = transformers_decoder(**given, lora=LORA)
    model.keep_in(precision)
    model.materialise(CPU)
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if ".lora_" in name:
            one.data = 0.1 * torch.randn_like(one)
    return model


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_saving_a_model_with_adapters_changes_no_bit_of_it_and_rounds_nothing(
    kind, precision, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base, run = origin(tmp_path / "base", kind), tmp_path / "run"
    model = adapted(base, precision)
    before = {name: (one, one.detach().clone()) for name, one in model.named_parameters()}
    assert "adapters merged" in model.save(run)
    assert [name for name, _ in model.named_parameters()] == list(before)
    for name, one in model.named_parameters():
        assert one is before[name][0], name
        assert torch.equal(one, before[name][1]), name
    # The origin's weights in float32, and peft's own merge into them.
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        run / "adapter",
    ).merge_and_unload()
    saved = transformers.AutoModelForCausalLM.from_pretrained(run)
    assert saved.dtype == torch.float32
    for name, one in theirs.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], one, rtol=0, atol=1e-7, msg=name)


def test_a_model_trains_on_after_it_was_saved_as_if_it_had_not_been(tmp_path: Path) -> None:
    base, ids = origin(tmp_path / "base"), tiny.tokens(2, 13)
    losses = {}
    for saves in (False, True):
        model = adapted(base, "bf16-mixed").train()
        model.save_memory(MemorySavings("selective", ffn_chunk=7))
        model.compile_blocks(backend="eager")
        optimizer = torch.optim.AdamW(
            [one for one in model.parameters() if one.requires_grad], lr=1e-2
        )
        losses[saves] = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss(ids, ids.roll(-1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[saves].append(loss.item())
            if saves:
                model.save(tmp_path / str(step))
    assert losses[True] == losses[False]


def test_adapters_of_random_weights_are_merged_into_the_models_own(tmp_path: Path) -> None:
    model, ids = adapted(None, "32-true"), tiny.tokens(1, 13)
    torch.manual_seed(7)  # other draws than the model's
    model.save(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(saved(ids).logits, model.eval()(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("saved", ["checkpoint", "peft"])
def test_adapters_begin_with_the_weights_of_earlier_ones(
    saved: str, kind: str, quantize: str | None, tmp_path: Path
) -> None:
    """Also experts', one adapter around another; peft's folder of those is not read, since its
    entries rank_pattern and alpha_pattern are not settings here."""
    pytest.importorskip("torchao" if quantize else "peft")
    base, ids = origin(tmp_path / "base", kind), tiny.tokens(1, 13)
    earlier = adapted(base, "32-true")
    state = {f"model.{name}": one for name, one in earlier.state_dict().items()}
    where = tmp_path / "best.ckpt" if saved == "checkpoint" else tmp_path / "peft"
    torch.save({"state_dict": state}, where) if saved == "checkpoint" else earlier.save_adapters(
        where
    )
    model = transformers_decoder(path=str(base), lora=LORA, quantize=quantize)
    model.start = adapter_weights(model.module, str(where))
    model.materialise(CPU)
    assert not model.start
    ours = model.state_dict()
    for name, one in earlier.state_dict().items():
        assert torch.equal(ours[name], one), name
    if quantize is None:
        torch.testing.assert_close(model.eval()(ids), earlier.eval()(ids), rtol=0, atol=0)


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_trained_hybrid_is_saved_as_transformers_alone_computes_it(
    kind: str, lora: dict | None, tmp_path: Path
) -> None:
    hybrid(kind, torch.float32).save_pretrained(tmp_path / "base")
    model = transformers_decoder(str(tmp_path / "base"), lora=lora)
    model.materialise(CPU)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids, positions = tiny.tokens(1, sum(LENGTHS)), tiny.positions(LENGTHS)
    before = model.eval()(ids)
    for _ in range(2):
        optimizer.zero_grad()
        model.train().loss(ids, ids.roll(-1, 1), positions=positions).backward()
        optimizer.step()
    model.save(tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert {one.dtype for one in saved.parameters()} == {torch.float32}
    with torch.no_grad():
        found, expected = saved(ids, use_cache=False).logits, model.eval()(ids)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (found - before).norm() > 1e-2 * expected.norm()
