"""Context parallelism as a Lightning strategy.

trainer = Trainer(devices=8, strategy=flashtrain.ContextParallelStrategy(context_parallel_size=8))
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from flashtrain.distributed.context.attention_check import check_shared
from flashtrain.distributed.context.batch import check_same_batch, shard_batch
from flashtrain.distributed.context.document_costs import DocumentCosts, costs_of
from flashtrain.distributed.context.group import ContextGroup
from flashtrain.distributed.context.layouts import LAYOUTS, layout_for
from flashtrain.distributed.context.methods import AUTO, METHODS
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.distributed.context.traffic import near_ranks
from flashtrain.distributed.context.transfers import exchange_first
from flashtrain.distributed.context.watchdog import Watchdog
from flashtrain.distributed.context.weighted_means import weighted_logs, weighted_output
from flashtrain.distributed.sharded_checkpoints import ShardedCheckpoints
from flashtrain.distributed.sharding import DATA_PARALLEL, blocks_of, shard
from flashtrain.errors import UserError, first_line, one_of
from flashtrain.models.sharded_sequence import use_sharded_sequence
from flashtrain.models.trainable import Trainable
from flashtrain.settings.options import ContextGroups
from flashtrain.training.killed_ranks import is_broken_connection

DATA, CONTEXT = "data", "context"  # dimensions of the mesh


class ContextParallelStrategy(ShardedCheckpoints):
    """Shards every sequence among `context_parallel_size` devices; the loss is that of
    training on one device.

    The module's attention must be flashtrain.models.Attention (as in Decoder), or a transformers
    model's after register_with_transformers. Any other attention is rejected in the first step.
    Learned positions must be those of flashtrain.next_positions, without a cache: torch.arange
    would number a rank's tokens from 0, which nothing detects. A batch is a dictionary with
    "tokens" (B, S), or transformers' "input_ids", and "labels" (B, S), -100 for ignored; they are
    shifted, except for a transformers model, which shifts them itself. A mask is made from the
    whole sequence, `whole(batch, "documents")`.

    What training_step returns, or passes to manual_backward, counts as the mean over the rank's
    labels. The strategy weights it, so that gradients are those of the mean over all labels of the
    micro-batch, on all devices. It does the same to a floating scalar that a step logs with
    sync_dist=True. A step that does this itself calls `mean_over_context`.

    The devices form a mesh data x context: ranks with one data index share their sequences, and
    FSDP2 shards the model over all of them. configure_model shards the module over
    `self.device_mesh` (one dimension, data_parallel, all devices); without it each of the module's
    children is sharded, block by block if it has `blocks`.

    Args:
        context_parallel_size: the number of devices that share a sequence; None: all.
            Others hold other samples.
        method: the context-parallel method: "ulysses", "all-gather", "ring", "hybrid" or "auto".
        layout: which device holds which tokens: "balanced" (of a model whose layers pass states:
            layouts.layout_for), "zigzag" or "contiguous".
        groups: which devices share what of a micro-batch: "fixed": all of them every row;
            "planned": as many as pay every document, by the expected time, those of all its rows
            together (document_plan.py). Then no token may see another document, and a document's
            last token has no label that the model shifts. A batch without documents is "fixed".
        documents: the batch's key of document ids (B, S), by which the work is balanced;
            None: ignore documents.
        timeout_seconds: seconds without progress after which the job ends; a dead rank ends it
            within a minute. None: no watchdog.
        on_failure: called on every other rank with the line that names the failed rank,
            before the process ends.
        save_distributed_checkpoint: True: folders of shards; False: single files; None: by size.
            Both kinds can be resumed on another number of devices and at another
            context_parallel_size, and reading them runs no code.
        check_attention: before the first step of training, validation, test and prediction, reject
            a module without shared attention, or whose tokens see each other by anything else,
            unless it has shares_sequences = True. False for a model whose tokens need not see
            tokens on other devices.

    Raises:
        UserError: a name is unknown; context_parallel_size does not divide the devices; in
            the first step, the method does not fit the number of heads, or attention is
            limited to one device's tokens.
    """

    shares_sequences = True  # read by tasks, without importing this file

    def __init__(
        self,
        context_parallel_size: int | None = None,
        *,
        method: str = AUTO,
        layout: str = "balanced",
        groups: str = "fixed",
        documents: str | None = "documents",
        timeout_seconds: float | None = 1800.0,
        on_failure: Callable[[str], None] | None = None,
        save_distributed_checkpoint: bool | None = True,
        check_attention: bool = True,
        **options: Any,
    ) -> None:
        if timeout_seconds is not None:
            # The watchdog reports which rank is stuck, so it must end the job before a
            # collective times out.
            options.setdefault(
                "timeout", max(default_pg_timeout, timedelta(seconds=2 * timeout_seconds))
            )
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **options)
        one_of("context-parallel layout", layout, LAYOUTS)
        one_of("context-parallel method", method, (AUTO, *METHODS))
        one_of("context-parallel groups", groups, get_args(ContextGroups))
        self.context_parallel_size = context_parallel_size
        self.method = method
        self.layout = layout
        self.groups = groups
        self.documents = documents
        self.watchdog = Watchdog(timeout_seconds, on_failure=on_failure)
        self.context: ContextGroup | None = None
        self.sequence: ContextSequence | None = None
        self._data_rank = 0
        self.check_attention = check_attention
        self._checked: set[str] = set()  # "batch" and the kinds of step, such as "training"
        self._suited: str | None = None
        self._costs: DocumentCosts | None = None

    @property
    def data_ranks(self) -> int:
        """The number of groups of devices that hold different samples."""
        return self.num_nodes * self.num_processes // self._degree

    @property
    def tokens_of_batch(self) -> int:
        """The number of tokens in the latest batch, summed over all devices as if each had this
        one's number; 0 before the first batch."""
        return 0 if self.sequence is None else self.sequence.tokens * self.data_ranks

    @property
    def _degree(self) -> int:
        size = self.context_parallel_size
        return self.num_nodes * self.num_processes if size is None else size

    def setup_environment(self) -> None:
        """Check that context_parallel_size divides the devices; join the ranks and make
        the mesh data x context."""
        from torch.distributed.device_mesh import init_device_mesh

        world, degree = self.num_nodes * self.num_processes, self._degree
        if degree < 1 or world % degree:
            fitting = ", ".join(
                str(number) for number in range(1, world + 1) if world % number == 0
            )
            raise UserError(
                f"context_parallel={degree} on {world} devices. Expected one of {fitting}."
            )
        exchange_first()
        self._setup_distributed()
        # A validation after a fit reuses the groups: each of NCCL's takes memory.
        if self.context is None:
            kind = self.root_device.type
            mesh = init_device_mesh(
                kind, (self.data_ranks, self._degree), mesh_dim_names=(DATA, CONTEXT)
            )
            data_group = mesh.get_group(DATA) if self.data_ranks > 1 else None
            near = near_ranks(degree, self.num_processes)
            self.context = ContextGroup(
                mesh.get_group(CONTEXT),
                data_group,
                self.root_device,
                near,
                planned=self.groups == "planned",
            )
            self._data_rank = mesh.get_local_rank(DATA)
            # The mesh that modules shard themselves over: all devices, whatever they share.
            self._device_mesh = init_device_mesh(
                kind, (self.world_size,), mesh_dim_names=(DATA_PARALLEL,)
            )
        module = self._module
        module._device_mesh = self._device_mesh
        if not is_overridden("configure_model", module):
            module.configure_model = partial(_shard_children, module)  # type: ignore[method-assign]
        self.watchdog.start()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The distributed sampler's arguments that give ranks which share a sequence the same
        samples."""
        return {"num_replicas": self.data_ranks, "rank": self._data_rank}

    def setup(self, trainer: pl.Trainer) -> None:
        self._checked.clear()
        self._suited = self._costs = None
        super().setup(trainer)

    def teardown(self) -> None:
        self.watchdog.stop()
        self.sequence = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Handle a failure: after a broken collective wait until the watchdog names the failed
        rank, else report this rank's failure to the other ranks."""
        if is_broken_connection(exception):
            self.watchdog.await_verdict()
        self.watchdog.stop(first_line(exception))
        super().on_exception(exception)

    @property
    def _layout(self) -> str:
        """The layout that suits the module's layers."""
        if self._suited is None:
            models = (one for one in self._module.modules() if isinstance(one, Trainable))
            shape = next((one.shape for one in models if one.shape is not None), None)
            self._suited = layout_for(
                self.layout, () if shape is None else shape.layers, self.method
            )
        return self._suited

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Return this rank's part of the batch, on `device`; the rest is never copied there."""
        self.watchdog.mark("a batch")
        assert self.context is not None
        if "batch" not in self._checked:
            check_same_batch(batch, self.context)
            self._checked.add("batch")
        if self.context.planned and self._costs is None:
            self._costs = costs_of(self._module, self.context.near)
        part, self.sequence = shard_batch(
            batch,
            self.context,
            documents=self.documents,
            layout=self._layout,
            method=self.method,
            costs=self._costs,
        )
        self.sequence.refuses_own_part = self.check_attention
        return super().batch_to_device(part, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return weighted_output(
            self.sequence, self._step("training", super().training_step, *args, **kwargs)
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("prediction", super().predict_step, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.watchdog.mark(f"backward of step {self._module.global_step + 1}")
        sequence = self.sequence
        if sequence is not None and not self._module.automatic_optimization:
            closure_loss = (
                closure_loss
                if sequence.has_weighted(closure_loss)
                else closure_loss * sequence.weight
            )
        with use_sharded_sequence(self.sequence):  # activation checkpointing computes blocks again
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _step(self, kind: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module on its sharded sequence; the first step of each kind is
        checked before (check_shared)."""
        self.watchdog.mark(f"{kind} at step {self._module.global_step + 1}")
        declared = getattr(self._module, "shares_sequences", None)
        if self.check_attention and self._degree > 1 and kind not in self._checked and not declared:
            assert self.sequence is not None
            precision = self.precision_plugin.forward_context
            if check_shared(self._module, step.__name__, precision, self.sequence, *args):
                self._checked.add(kind)
        with use_sharded_sequence(self.sequence), weighted_logs(self._module, self.sequence):
            return step(*args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        self.watchdog.mark("saving a checkpoint")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.watchdog.mark("loading a checkpoint")
        return super().load_checkpoint(checkpoint_path, weights_only)


def _shard_children(module: pl.LightningModule) -> None:
    """Shard the module's children, for a module without configure_model of its own. Raises
    UserError if parameters lie outside the children."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise UserError(
            f"{type(module).__name__} has parameters of its own ({', '.join(own)}). "
            "Shard them over self.device_mesh in configure_model, or move them into a submodule."
        )
    from torch.distributed.fsdp import FSDPModule

    for child in module.children():
        if isinstance(child, FSDPModule) or not any(True for _ in child.parameters()):
            continue
        shard(child, module.device_mesh, str(module.trainer.precision), blocks=blocks_of(child))
