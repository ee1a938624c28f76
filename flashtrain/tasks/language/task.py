"""Next-token prediction, as a LightningModule around a decoder.

B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from flashtrain.data.packing import Batch, ChatBatch
from flashtrain.errors import UserError
from flashtrain.models.activation_checkpointing import compile_lean
from flashtrain.models.generation import MaskMaker
from flashtrain.models.sharded_sequence import mean_over_context, sharded_sequence, whole
from flashtrain.models.trainable import Trainable, as_trainable, check_contract, inner
from flashtrain.tasks.attention_masks import causal_length
from flashtrain.tasks.training_task import TrainingTask, replayed
from flashtrain.training.memory import GROUP_BYTES
from flashtrain_kernels import Mask, masks
from flashtrain_kernels.loss_head import IGNORED


class LanguageModel(TrainingTask):
    """Trains a decoder on batches of packed text (flashtrain.data.packing.Batch, or ChatBatch).

    Logs `train_loss`, `gradient_norm` (before clipping) and `validation_loss`, in nats a token. The
    `train_loss` of a mixture-of-experts model includes its balancing loss; that of a step's last
    micro-batch is logged too.

    Args:
        model: has `.loss(tokens, labels, positions=, mask=)`, a float32 scalar, as Decoder does; or
            any module whose forward gives logits (B, S, V) of tokens (B, S).
        document_mask: attention stays within each document of a packed row, and
            positions restart there.
        mask: returns each batch's mask, in place of document_mask and of the causal rule: called by
            name with documents and positions (B, S), seqlen S and device, it returns a
            flashtrain_kernels Mask, or None for the model's own rule. Labels that the predicting
            token can see are not scored.
        compile: run the loss through torch.compile (one graph, static shapes).
        cuda_graphs: record the launches of the compiled loss once, forward and backward, and replay
            them: for models so small that launching takes longer than computing. Without effect
            unless the loss is compiled as a whole.
        options: see TrainingTask.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        document_mask: bool = False,
        mask: MaskMaker | None = None,
        compile: bool = False,
        cuda_graphs: bool = False,
        **options: Any,
    ) -> None:
        model = as_trainable(model)
        if document_mask or mask is not None:
            takes = ("positions", "mask") if document_mask else ("mask",)
            check_contract(model, type(inner(model)).__name__, takes)
        super().__init__(model, **options)
        self.model: Trainable = model
        self.strict_loading = not model.keeps_part
        self.document_mask = document_mask
        self.mask = mask
        # Of those that have one alone: Lightning warns of this hook next to any data module.
        if mask is not None:
            self.on_before_batch_transfer = self._score_unseen  # type: ignore[method-assign]
        self._compile = compile
        self._replays = compile and cuda_graphs
        self._compiled: Callable[..., Tensor] | None = None
        self._shard_mesh_seen = False
        self._mean_length, self._packed_batches = torch.zeros(()), 0  # see mean_length

    def configure_model(self) -> None:
        """Shard the weights if the strategy brings a device mesh (FSDP2), then compile."""
        shares = self._trainer is not None and getattr(
            self.trainer.strategy, "shares_sequences", False
        )
        if self.device_mesh is not None and not self._shard_mesh_seen:
            from flashtrain.distributed.sharding import shard

            together = 0 if shares else GROUP_BYTES
            shard(self.model, self.device_mesh, str(self.trainer.precision), group_bytes=together)
            self._shard_mesh_seen = True
        if self._trainer is not None:
            self.model.materialise(self.trainer.strategy.root_device)
        # Under full checkpointing each block is compiled by itself: offloading runs between blocks,
        # and one block at a time is computed again (compiled as a whole, 1.3B at 524,288 tokens
        # took 30 GiB more on an H200). Under context parallelism blocks are compiled in parts
        # before and behind their attention, which communicates.
        apart = self._compile and (self.model.recomputes_blocks or shares)
        uneven = shares and getattr(self.trainer.strategy, "groups", "fixed") == "planned"
        dynamic = None if uneven else False  # None: compiled for any number once a second one comes
        if apart and self.model.compile_blocks(dynamic=dynamic, fullgraph=not shares):
            self._replays = False
            # DDP's buckets need not divide a block, and torch cannot divide one that
            # recomputes parts of itself.
            torch._dynamo.config.optimize_ddp = False
        elif self._compile:
            # FSDP2's hooks break the graph between blocks, so one full graph is
            # requested only without it.
            self._compiled = compile_lean(
                self.loss,
                dynamic=False,
                fullgraph=not self._shard_mesh_seen,
                mode="reduce-overhead" if self._replays else None,
            )

    @property
    def mean_length(self) -> int | None:
        """The length of a causal sequence whose tokens need as many FLOPs as the packed documents
        that this device has trained on so far, on average; None if nothing was packed.

        Reading this property waits for the device.
        """
        return max(1, round(self._mean_length.item())) if self._packed_batches else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, vocabulary rows) of tokens (B, S)."""
        return self.model(tokens)

    def loss(self, *batch: Any, **named: Any) -> Tensor:
        """Return the model's mean loss for tokens and labels (B, S), with positions= and mask= by
        name.

        A task with another loss overrides this method, which is compiled if `compile` is set, and
        used in training and validation.
        """
        return self.model.loss(*batch, **named)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the micro-batch's mean loss; the mean over the optimizer step's
        micro-batches is logged."""
        loss, share = self.batch_loss(batch), None
        # Of conversations, whose micro-batches have different numbers of labels.
        if "weight" in batch:
            loss = loss * cast(ChatBatch, batch)["weight"]
        elif self.document_mask or self.mask is not None:
            # So have those of rows where documents end.
            sequence = sharded_sequence()
            tokens = batch["labels"].numel() if sequence is None else sequence.tokens
            share = _label_count(batch).to(loss) / tokens
            loss = loss * share
        step_loss = self.record_loss(loss, batch_idx, share)
        if step_loss is not None and self.is_logged_step():
            self.log("train_loss", step_loss, prog_bar=True, sync_dist=self.trainer.world_size > 1)
            if self.model.balancing_loss is not None:
                self.log(
                    "balancing_loss",
                    self.model.balancing_loss,
                    sync_dist=self.trainer.world_size > 1,
                )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the micro-batch to the held-out loss, the mean over all held-out
        labels of all ranks."""
        loss = self.batch_loss(batch)
        given = cast(ChatBatch, batch)["label_count"] if "label_count" in batch else None
        # Times the ranks: Lightning's mean of their counts is cut to a whole number.
        count = round(
            float((_label_count(batch) if given is None else given) * self.trainer.world_size)
        )
        loss = loss if count else torch.zeros_like(loss)  # some models' mean over no labels is NaN
        self.log("validation_loss", loss, prog_bar=True, sync_dist=True, batch_size=count)

    def _score_unseen(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Return the batch, not yet sharded, with IGNORED for labels that the predicting token sees
        itself, as in a prefix."""
        mask, labels = self._mask(batch["documents"], batch["positions"]), batch["labels"]
        shown = None if mask is None else next_shown(mask)
        if shown is None or not bool(shown.any()):
            return batch
        labels = labels.masked_fill(shown, IGNORED)
        if bool((batch["labels"] != labels).any()) and not bool((labels != IGNORED).any()):
            raise UserError(
                "the mask lets every token see its label, the next token, so that there is nothing "
                "to predict. Use mask=causal."
            )
        return Batch(**{**batch, "labels": labels})

    def _mask(self, documents: Tensor, positions: Tensor) -> Mask | None:
        if self.mask is None:
            return masks.document(documents, causal=True)
        return self.mask(
            documents=documents,
            positions=positions,
            seqlen=documents.shape[1],
            device=documents.device,
        )

    def batch_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch in nats, differentiable; nothing is logged."""
        positions = batch["positions"] if self.document_mask else None
        mask: Mask | None = None
        if self.document_mask or self.mask is not None:
            # The mask is of the whole sequence, also where devices share it.
            mask = self._mask(whole(batch, "documents"), whole(batch, "positions"))
        if self.document_mask and self.training and mask is not None:
            self._packed_batches += 1
            mean, length = self._mean_length.to(mask.queries.device), causal_length(mask)
            if (sequence := sharded_sequence()) is not None:
                length = sequence.batch_mean(length)
            self._mean_length = mean + (length - mean) / self._packed_batches
        loss = self._compiled or self.loss
        if not self._replays:
            return mean_over_context(
                loss(batch["tokens"], batch["labels"], positions=positions, mask=mask)
            )
        return replayed(loss, batch["tokens"], batch["labels"], positions=positions, mask=mask)


def _label_count(batch: Batch) -> Tensor:
    """Return the number of labels over which a micro-batch's loss is the mean; if devices share
    sequences, its mean over the groups of devices."""
    sequence = sharded_sequence()
    return (batch["labels"] != IGNORED).sum() if sequence is None else sequence.label_count


def next_shown(mask: Mask) -> Tensor:
    """Return (B or 1, S) bool: whether each token sees the next token, under a
    mask in sequence order."""
    rows = mask.queries
    following = torch.arange(1, rows.shape[2] + 1, device=rows.device)
    shown = (rows[masks.LOW] <= following) & (following < rows[masks.HIGH])
    if rows.shape[0] > masks.HIGH2:
        shown = shown | ((rows[masks.LOW2] <= following) & (following < rows[masks.HIGH2]))
    return shown
