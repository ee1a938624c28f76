"""The check before the first step of other trainers: Lightning's, transformers' and trl's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import transformers
from checks.model_types import model_of
from checks.test_faults import Carries
from datasets import Dataset
from torch.utils.data import DataLoader

import flashtrain
from flashtrain.integrations import register_with_transformers

VOCABULARY, LENGTHS = 60, (20, 9, 31, 12) * 4


def documents() -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(4, VOCABULARY, (one,), generator=draws).tolist()}
        for one in LENGTHS
    ]


def test_lightnings_trainer_ends_before_the_first_step_of_a_leaking_module() -> None:
    collate = transformers.DataCollatorWithFlattening()
    loader = DataLoader(documents(), batch_size=4, collate_fn=collate)
    trainer = pl.Trainer(
        max_steps=1, callbacks=[flashtrain.LightningCheck()], logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Carries()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters())  # type: ignore
    with pytest.raises(flashtrain.UserError, match=r"documents apart.*GRU|gru"):
        trainer.fit(module, loader)
    assert trainer.global_step == 0


def test_the_check_draws_no_random_number_of_the_training() -> None:
    """Else the first epoch of a shuffled loader would be of another order."""
    own = torch.Generator().manual_seed(1)
    packed = transformers.DataCollatorWithFlattening()
    loader = DataLoader(documents(), 4, shuffle=True, generator=own, collate_fn=packed)
    plugin = pl.plugins.Precision()
    trainer: Any = SimpleNamespace(train_dataloader=loader, precision_plugin=plugin)
    model = model_of("llama", "sdpa")
    state, of_loader = torch.get_rng_state(), own.get_state()
    flashtrain.LightningCheck().on_train_start(trainer, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(own.get_state(), of_loader)


def test_under_autocast_losses_may_differ_by_sixteen_bits() -> None:
    """Autocast keeps the weights in float32. It is trl's default."""

    class Mixed(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of("llama", "sdpa")

        def training_step(self, batch: Any, _: int) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(**batch, use_cache=False).loss

    report = flashtrain.check(Mixed())
    assert not report.faults, report
    assert max(row.figure or 0 for row in report) > 1e-6  # they do differ


def trained(model: Any, folder: Path, collate: Any = None) -> int:
    """The steps that transformers' Trainer takes with the check."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=documents(),
        data_collator=collate or transformers.DataCollatorWithFlattening(),
        callbacks=[flashtrain.trainer_check()],
    )
    trainer.train()
    return trainer.state.global_step


def without_positions(documents: list[dict[str, Any]]) -> dict[str, Any]:
    made = transformers.DataCollatorWithFlattening()(documents)
    return {name: made[name] for name in ("input_ids", "labels")}


def test_a_collator_that_joins_documents_and_says_nothing_of_them_is_found(tmp_path: Path) -> None:
    """Its batch is one document to the check; what it does is seen on documents that are known."""
    with pytest.raises(flashtrain.UserError, match="documents apart"):
        trained(model_of("llama", "sdpa"), tmp_path, collate=without_positions)
    loader: Any = DataLoader(documents(), 4, collate_fn=without_positions)
    plugin = pl.plugins.Precision()
    trainer: Any = SimpleNamespace(train_dataloader=loader, precision_plugin=plugin)
    with pytest.raises(flashtrain.UserError, match="documents apart"):
        flashtrain.LightningCheck().on_train_start(trainer, model_of("llama", "sdpa"))


def test_one_document_a_batch_is_no_fault(tmp_path: Path) -> None:
    loader: Any = DataLoader(
        documents(), 1, collate_fn=lambda one: {
            "input_ids": torch.tensor([one[0]["input_ids"]]),
            "labels": torch.tensor([one[0]["input_ids"]]),
        },
    )  # fmt: skip
    plugin = pl.plugins.Precision()
    trainer: Any = SimpleNamespace(train_dataloader=loader, precision_plugin=plugin)
    flashtrain.LightningCheck().on_train_start(trainer, model_of("llama", "sdpa"))


def test_a_step_that_multiplies_by_a_batchs_weight_is_checked_whole() -> None:
    """As one on ChatDataModule's batches, whose weight is a number."""

    class Weighted(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of("llama", "sdpa")

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            weight = batch.pop("weight")
            return self.model(**batch, use_cache=False).loss * weight

    batch = transformers.DataCollatorWithFlattening()(documents()[:4])
    report = flashtrain.check(Weighted(), {**batch, "weight": 0.5})
    assert not report.faults, report
    assert "layer 0: attention" in {row.check for row in report}


def test_transformers_collator_leaks_in_a_hybrid_and_not_in_attention(tmp_path: Path) -> None:
    assert trained(model_of("llama", "sdpa"), tmp_path) == 1
    with pytest.raises(flashtrain.UserError, match=r"documents apart.*layers\.0\.conv"):
        trained(model_of("lfm2", "sdpa"), tmp_path)


def trl_trainer(kind: str, attention: str, strategy: str, folder: Path) -> Any:
    trl = pytest.importorskip("trl")
    implementation = register_with_transformers() if attention == "ours" else attention
    arguments = trl.SFTConfig(
        str(folder), max_steps=1, max_length=64, packing=True, packing_strategy=strategy,
        per_device_train_batch_size=1, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return trl.SFTTrainer(
        model_of(kind, implementation),
        arguments,
        train_dataset=Dataset.from_list(documents()),
        processing_class=tokenizer(),
        callbacks=[flashtrain.trainer_check()],
    )


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt_oss"])
def test_trls_packed_rows_leak_where_transformers_masks_lack_positions(
    kind: str, tmp_path: Path
) -> None:
    """sdpa and eager attention see documents by position_ids alone, which these two models do not
    give to their masks; ours also reads trl's cu_seq_lens_q."""
    stock = trl_trainer(kind, "eager" if kind == "gpt_oss" else "sdpa", "bfd", tmp_path)
    if kind == "llama":
        stock.train()
    else:
        with pytest.raises(flashtrain.UserError, match=r"documents apart.*self_attn"):
            stock.train()
    ours = trl_trainer(kind, "ours", "bfd", tmp_path)
    ours.train()
    assert ours.state.global_step == 1


def test_trls_wrapped_rows_say_nothing_of_their_documents(tmp_path: Path) -> None:
    trainer = trl_trainer("llama", "sdpa", "wrapped", tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    assert flashtrain.check(trainer.model, batch).faults == []  # a row is one document to it
    found = flashtrain.check(trainer.model, batch, lengths=(20, 9, 31, 4)).faults
    assert "documents apart" in {row.check for row in found}


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", eos_token="w1", unk_token="w2"
    )
