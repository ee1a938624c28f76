"""Check that documents of a row do not see each other, and that what a model declares is felt.

    print(flashtrain.check(model))                       # any decoder of transformers
    print(flashtrain.check(module, next(iter(loader))))  # a LightningModule and its batch

Each row of the table is one question, answered by forwards that differ in one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from flashtrain.announce import say
from flashtrain.checks.declared import declared
from flashtrain.checks.packed import (
    LENGTHS,
    OURS,
    ROUNDING,
    ROUNDING_16,
    THEIRS,
    Batch,
    Packed,
    made_batch,
)
from flashtrain.checks.questions import NONE, QUESTIONS, Report, Row, loss_of, vocabulary_of
from flashtrain.checks.ranks import equals_ranks
from flashtrain.distributed.context.batch import LABELS
from flashtrain.errors import UserError, first_line
from flashtrain.models.trainable import Trainable
from flashtrain.tasks.language.task import LanguageModel


def check(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    ranks: int = 1,
    shard: Callable[[Batch, int, int], Batch] | None = None,
) -> Report:
    """Check what a model's tokens see; nothing of it is changed.

    Args:
        model: a decoder of transformers (also with adapters), one of flashtrain's, or a
            LightningModule whose training_step returns its mean loss.
        batch: a batch as the model is trained on; None: one is made.
        collator: a trainer's collator, which makes the batch of samples {"input_ids": [...]}.
        lengths: the documents' lengths; None: what the batch says by position_ids,
            cu_seq_lens_q, seq_idx, documents or attention_mask.
        ranks: above 1: also compute the loss on so many processes that share the batch's rows.
        shard: shard(batch, rank, ranks) returns a rank's part for a model that shares rows by
            itself; None: flashtrain's context parallelism shares them.

    Raises:
        UserError: the model cannot compute the loss of the batch.
    """
    if isinstance(model, Trainable):
        model = LanguageModel(model, document_mask=True)
    names = OURS if isinstance(model, LanguageModel) else THEIRS
    made = made_batch(vocabulary_of(model), LENGTHS, names)
    if collator is not None:
        documents = made[names[0]][0]
        batch = collator([{"input_ids": one.tolist()} for one in documents.split(LENGTHS)])
        tokens = batch.get("input_ids", batch.get("tokens", made[LABELS]))
        # Where it put them one after the other, whatever it says of them.
        joined = torch.equal(tokens.flatten(), documents)
        lengths = LENGTHS if joined and lengths is None else lengths
    packed = Packed(batch or made, lengths)
    # HuggingFaceDecoder.module is not among its submodules.
    inner = [vars(one).get("module") for one in model.modules()]
    modules = [*model.modules(), *(one for one in inner if isinstance(one, nn.Module))]
    modes = [(one, one.training) for one in modules]
    model.eval()
    report = Report()
    try:
        # Compiled code would be compiled for each length, and the training's limit be used up.
        with isolate_rng(), torch.compiler.set_stance("force_eager"):
            try:
                loss, packed.rounding = _first_loss(model, packed.batch)
                if not loss.isfinite():
                    raise UserError("its loss is not finite (is there a label?)")
            except Exception as error:
                fails = f"{type(model).__name__} fails on the batch: {first_line(error)}."
                raise UserError(fails) from error
            for ask in (*QUESTIONS, declared):
                try:
                    report.extend(ask(model, packed))
                except Exception as error:  # noqa: BLE001 - of a model that no one here wrote
                    name = ask.__name__.replace("_", " ")
                    report.append(Row(name, NONE, f"it fails: {first_line(error)}"))
            if ranks > 1:
                report.append(equals_ranks(model, packed, ranks, shard))
    finally:
        for one, mode in modes:
            one.training = mode
    return report


def _first_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """Return the loss of a batch, and how far losses are apart by rounding: autocast computes in 16
    bits with weights of 32."""
    sizes: set[int] = set()

    def hear(_: Any, __: Any, output: Any) -> None:
        tensors = (x for x in tree_leaves(output) if isinstance(x, Tensor))
        sizes.update(x.dtype.itemsize for x in tensors if x.is_floating_point())

    hook = register_module_forward_hook(hear)
    try:
        loss = loss_of(model, batch)
    finally:
        hook.remove()
    return loss, ROUNDING_16 if min(sizes, default=4) < 4 else ROUNDING


class LightningCheck(pl.Callback):
    """Checks a LightningModule on its first training batch."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.precision_plugin.train_step_context():
            _check_first(pl_module, trainer.train_dataloader)


def trainer_check() -> Any:
    """Return a callback for transformers' Trainer and trl's, which checks the model on its first
    training batch."""
    from transformers import TrainerCallback

    class TrainerCheck(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            _check_first(given["model"], given["train_dataloader"])

    return TrainerCheck()


def _check_first(model: Any, loader: Any) -> None:
    # A sampler draws: the training must not see other samples for it.
    drawing = {
        getattr(one, "generator", None) for one in (loader, getattr(loader, "sampler", None))
    }
    kept = [(one, one.get_state()) for one in drawing if isinstance(one, torch.Generator)]
    with isolate_rng():
        batch = dict(next(iter(loader)))
        for one, state in kept:
            one.set_state(state)
        if dist.is_initialized():  # sharded weights need the same forwards on all ranks
            moved = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in batch.items()}
            dist.broadcast_object_list(found := [moved])
            batch = found[0]
        report = check(model, batch)
        # A batch may say nothing of its documents: its collator shows what becomes of known ones.
        if any(row.verdict == NONE and row.check == "documents apart" for row in report):
            with suppress(Exception):  # of a collator that takes no plain tokens
                report = check(model, collator=loader.collate_fn)
    say(f"checked the first batch:\n{report}")
    report.require()
