"""Masked-language training as a Lightning task: losses, accuracy, accumulation."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from quiet_trainer import FailsInStep3, quiet_trainer

from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.masking import score_arguments
from flashtrain.models import Bert, BertConfig
from flashtrain.tasks import MaskedLanguageModel

TEXT = "\n\n".join(
    " ".join(f"{word}{number % 3}" for word in ("ab", "cd", "ef", "gh")) for number in range(200)
)


class OneText:
    def describe(self):
        return "a text"

    def fingerprint(self):
        return "a text"

    def documents(self):
        yield from (TEXT, TEXT[40:2000])

    def approximate_bytes(self):
        return len(TEXT)


class Losses(pl.Callback):
    def __init__(self):
        self.train, self.accuracy = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        if "train_loss" in trainer.callback_metrics:
            self.train.append(trainer.callback_metrics["train_loss"].item())

    def on_validation_end(self, trainer, pl_module):
        self.accuracy.append(trainer.callback_metrics["validation_accuracy"].item())


def data(folder, **options) -> MaskedTextDataModule:
    options = {
        "total_steps": 6,
        "validation_fraction": 0.4,
        "cache_dir": folder,
        **options,
    }
    return MaskedTextDataModule(OneText(), "bytes", 32, 512, **options)


def task(**options) -> MaskedLanguageModel:
    torch.manual_seed(0)
    config = BertConfig.of_size("tiny", vocab_size=261, context=32)
    return MaskedLanguageModel(Bert(config, "sdpa"), **options)


def fit(folder, module, *callbacks, stop_at=None, **options):
    losses = Losses()
    source = data(folder / "cache", **options)
    accumulate = source.accumulate
    trainer = quiet_trainer(
        stop_at or source.total_steps, log_every_n_steps=1, num_sanity_val_steps=0,
        limit_val_batches=1.0,
        accumulate_grad_batches=accumulate, callbacks=[losses, *callbacks], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, datamodule=source)
    return trainer, losses, source


def test_the_work_of_a_step_that_fails_is_not_counted(tmp_path):
    stopped, failed = task(), task()
    fit(tmp_path, stopped, accumulate=2, stop_at=2)
    with pytest.raises(ArithmeticError):
        fit(tmp_path, failed, FailsInStep3(), accumulate=2)
    done = [(one.tokens_done, one.sequences_done, one.flops_done) for one in (stopped, failed)]
    assert done[0] == done[1] > (0, 0, 0)


def test_a_step_of_two_micro_batches_learns_from_the_mean_over_its_labels(tmp_path):
    module = task()
    _, losses, _ = fit(tmp_path, module, total_steps=1, accumulate=2)
    fresh = task().bert
    source = data(tmp_path / "cache", total_steps=1, accumulate=2)
    source.setup()
    batches = list(source.train_dataloader())
    scores = [fresh.score(**score_arguments(batch)) for batch in batches]
    assert len(scores) == 2
    mean = sum(score.loss_sum for score in scores) / sum(score.labels for score in scores)
    assert losses.train[-1] == pytest.approx(mean.item(), abs=1e-5)
    assert module.tokens_done == sum(batch["real_tokens"] for batch in batches)
    lengths = [
        length for batch in batches for length in batch["cu_seqlens"].diff().tolist() if length
    ]
    labels = sum(batch["scored"] for batch in batches)
    assert module.flops_done == pytest.approx(fresh.config.flops(lengths, labels))


def test_accuracy_is_the_share_of_held_out_labels_found(tmp_path):
    module = task()
    trainer, losses, source = fit(tmp_path, module, total_steps=2)
    with torch.no_grad():
        found = total = 0
        for batch in source.val_dataloader():
            logits = module.bert.eval()(batch["tokens"], cu_seqlens=batch["cu_seqlens"])
            labels = batch["labels"]
            found += (logits[batch["masked"]].argmax(-1) == labels)[labels != -100].sum().item()
            total += (labels != -100).sum().item()
    assert total > 50
    assert losses.accuracy[-1] == pytest.approx(found / total, abs=1e-6)
    assert trainer.callback_metrics["validation_loss"] < 6
