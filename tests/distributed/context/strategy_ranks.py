"""A plain Lightning script, without Hydra, that gloo ranks run for test_context_strategy.py;
and what it must equal.

python strategy_ranks.py FOLDER  forks the ranks as torchrun would; each writes
                                 FOLDER/NAME/RANK.json
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attention_ranks
import pytorch_lightning as pl
import torch
from ranks import end, fork, report, start
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from unshared_models import UNSHARED

import flashtrain
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.distributed.sharding import shard
from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig, MemorySavings, RotaryPositions
from flashtrain.models.layer_spec import layers_alike
from flashtrain.models.sharded_sequence import mean_over_context, whole
from flashtrain.models.trainable import Trainable
from flashtrain.tasks import LanguageModel
from flashtrain_kernels import masks

VOCABULARY, CONTEXT, ROWS = 29, 45, 2


class ForeignDecoder(nn.Module):
    """Someone's own model: an embedding, two blocks around
    flashtrain.models.Attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(
            flashtrain.Attention(16, 4, 2, rotary=RotaryPositions(4), dropout=0.2) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Any = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x, mask=mask)
        return self.head(x)


class PlainTask(pl.LightningModule):
    """Someone's own training: nothing in it knows of context parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = ForeignDecoder().double()
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.decoder(batch["tokens"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("validation", mean_over_context(self.loss(batch)), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-2)


HOW = ("weighs", "leaves", "logs")


class ManualTask(PlainTask):
    """A step that steps its optimizer itself, and returns nothing. how: it "weighs" its loss,
    "leaves" that to the strategy, or "logs" the mean and leaves the loss as it is."""

    def __init__(self, how: str = "weighs") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how
        self.steps_taken = 0

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True)
        mean = loss if self.how == "leaves" else mean_over_context(loss)
        self.manual_backward(mean if self.how == "weighs" else loss)
        optimizer.step()
        self.steps_taken += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class DocumentTask(PlainTask):
    """A Decoder of ours under a document mask, sharded by configure_model."""

    def __init__(self, savings: MemorySavings | None = None) -> None:
        pl.LightningModule.__init__(self)
        self.losses = []
        torch.manual_seed(1)
        config = DecoderConfig(
            VOCABULARY, 32, CONTEXT, 16, layers_alike(2, 16, 4, 2, 24, rotary=True), "rotary"
        )
        self.model = Decoder(config).double()
        self.model.save_memory(savings or MemorySavings())
        self.gradients: list[list[float]] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask = masks.document(whole(batch, "documents"), causal=True)
        return self.model.loss(
            batch["tokens"], batch["labels"], positions=batch["positions"], mask=mask
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        full = [
            getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in self.model.parameters()
        ]
        self.gradients.append([x for gradient in full for x in gradient.flatten().tolist()])


class OurTask(LanguageModel):
    """The language-modelling task of our own, with a document mask."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        config = DecoderConfig.of_size("demo", "llama", vocab_size=VOCABULARY, context=CONTEXT)
        config = config.changed(layers=1, embed=16, ffn=24)
        super().__init__(Decoder(config).double(), document_mask=True)


def row(index: int) -> dict[str, Tensor]:
    """The labels of its first document count for nothing, as of a prompt."""
    generator = torch.Generator().manual_seed(index)
    text = (
        torch.randint(VOCABULARY, (CONTEXT + 1,), generator=generator).cumsum(0) // 7 % VOCABULARY
    )
    documents = (torch.arange(CONTEXT) > 4 + index % 7).int() + (torch.arange(CONTEXT) > 30).int()
    starts = (documents[:, None] > documents[None]).sum(1)
    labels = torch.where(documents == 0, -100, text[1:])
    positions = torch.arange(CONTEXT) - starts
    return {"tokens": text[:-1], "labels": labels, "documents": documents, "positions": positions}


class Loaders(pl.LightningDataModule):
    """Rows in order (Lightning's own sampler would shuffle them); a data rank r of D
    reads rows r, r + D, ..."""

    def __init__(
        self,
        rows: int,
        batch: int = ROWS,
        skipped: int = 0,
        row: Callable[[int], dict[str, Tensor]] = row,
    ) -> None:
        super().__init__()
        self.rows, self.batch = [row(index) for index in range(rows)], batch
        self.skipped = skipped

    def loader(self, rows: list[dict[str, Tensor]]) -> DataLoader:
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {
            "num_replicas": 1,
            "rank": 0,
        }
        return DataLoader(rows[ranks["rank"] :: ranks["num_replicas"]], batch_size=self.batch)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.rows[self.skipped :])

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.rows[:4])


class Losses(pl.Callback):
    """What each training step returned."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(float(outputs["loss"]))


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {
        "accelerator": "cpu",
        "use_distributed_sampler": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(default_root_dir=folder, **{**quiet, **defaults, **options})


def twenty_steps(folder: Path, **options: Any) -> dict[str, Any]:
    """The plain script: 20 steps, clipped, accumulated over two batches, with evaluation;
    losses without dropout."""
    task = PlainTask()
    for block in task.decoder.blocks:
        block.dropout = 0.0
    fit = trainer(
        folder,
        max_steps=20,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        limit_val_batches=2,
        **options,
    )
    fit.fit(task, Loaders(80))
    return {"losses": task.losses, "validation": float(fit.callback_metrics["validation"])}


def whole_model(
    folder: Path, batch: int, savings: MemorySavings | None = None, **options: Any
) -> dict[str, Any]:
    """Three steps of the document model; gradients of the whole model at each."""
    task = DocumentTask(savings)
    trainer(folder, max_steps=3, **options).fit(task, Loaders(12, batch))
    return {"losses": task.losses, "gradients": task.gradients}


def begun(folder: Path, steps: int, **options: Any) -> list[float]:
    """The document model trained to so many steps, saved."""
    task = DocumentTask()
    fit = trainer(folder, max_steps=steps, **options)
    fit.fit(task, Loaders(40))
    fit.save_checkpoint(folder / "begun.ckpt")
    return task.losses


def resumed(folder: Path, steps: int, checkpoint: Path, **options: Any) -> list[float]:
    """Continued from `begun`, from batch to batch as an uninterrupted run."""
    task = DocumentTask()
    # Three steps of two rows are done.
    data = Loaders(40, skipped=6)
    trainer(folder, max_steps=steps, **options).fit(task, data, ckpt_path=checkpoint)
    return task.losses


def by_hand(folder: Path, how: str, **options: Any) -> list[float]:
    """Two steps that step their optimizer themselves: the loss of the second, the largest
    entry of each parameter."""
    task = ManualTask(how)
    for block in task.decoder.blocks:
        block.dropout = 0.0
    fit = trainer(folder, max_steps=2, **options)
    fit.fit(task, Loaders(8))
    entries = [
        getattr(p, "full_tensor", lambda p=p: p)().detach().abs().max().item()
        for p in task.parameters()
    ]
    return [float(fit.callback_metrics["train"]), *entries]


class Trouble(pl.Callback):
    """What one rank does in the middle of its second step."""

    def __init__(self, rank: int, act: Callable[[], None]) -> None:
        self.rank, self.act = rank, act

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == self.rank and batch_idx == 1:
            self.act()


def trouble(folder: Path, rank: int, act: Callable[[], None]) -> None:
    """Training that cannot end well."""
    quiet()
    verdict = (folder / f"{os.environ['RANK']}.verdict").write_text
    watched = flashtrain.ContextParallelStrategy(timeout_seconds=20, on_failure=verdict)
    devices = int(os.environ["WORLD_SIZE"])
    fit = trainer(
        folder, max_steps=9, callbacks=[Trouble(rank, act)], strategy=watched, devices=devices
    )
    fit.fit(PlainTask(), Loaders(80))


def our_task(folder: Path, **options: Any) -> dict[str, Any]:
    """Four steps of it; the logged losses are means of all ranks."""
    task = OurTask()
    fit = trainer(
        folder,
        max_steps=4,
        limit_val_batches=2,
        val_check_interval=4,
        log_every_n_steps=1,
        **options,
    )
    fit.fit(task, Loaders(40))
    return {
        name: float(fit.callback_metrics[name])
        for name in ("train_loss", "validation_loss", "gradient_norm")
    }


def refused(task: pl.LightningModule, folder: Path, **options: Any) -> str:
    """What training under the strategy ends with, and how many steps its optimizer took."""
    own = flashtrain.ContextParallelStrategy(timeout_seconds=None)
    fit = trainer(folder, max_steps=2, devices=2, strategy=own, **options)
    try:
        fit.fit(task, Loaders(8))
    except UserError as error:
        return f"{fit.global_step} steps: {error}"
    return f"{fit.global_step} steps"


def of(model: nn.Module, task: PlainTask) -> PlainTask:
    task.decoder = model.double()
    return task


class WatchfulTask(PlainTask):
    """Counts its steps, measures by a metric and in a list, and adds noise: what another run
    of a step would change."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_begun, self.seen, self.mean, self.dropout = 0, [], MeanMetric(), nn.Dropout(0.5)
        self.decoder.embedding.eval()  # as what is frozen

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.steps_begun += 1
        loss = (
            self.loss(batch) + self.dropout(torch.rand(8)).sum() + torch.rand(()) + random.random()
        )
        self.seen.append(float(loss))
        self.mean(loss.detach())
        self.log("train", loss)
        return loss


class DeclaredTask(WatchfulTask):
    shares_sequences = True


def watched(folder: Path, task: WatchfulTask, **options: Any) -> list[Any]:
    """Two steps, and all that they leave in the module."""
    pl.seed_everything(4)
    fit = trainer(folder, max_steps=2, devices=2, strategy=strategy(), **options)
    fit.fit(task, Loaders(8))
    modes = sorted(name for name, one in task.named_modules() if not one.training)
    logged = float(fit.callback_metrics["train"])
    return [task.losses, task.steps_begun, task.seen, float(task.mean.compute()), logged, modes]


class Hybrid(Trainable):
    """A registered model: an embedding, a recurrence h_t = a h_(t-1) + x_t or none, and
    one flashtrain.Attention."""

    def __init__(self, decay: float | None) -> None:
        super().__init__()
        self.embedding, self.decay = nn.Embedding(VOCABULARY, 32), decay
        self.blocks = nn.ModuleList([flashtrain.Attention(32, heads=4)])

    def scan(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0])]
        for t in range(x.shape[1]):
            states.append(self.decay * states[-1] + x[:, t])
        return torch.stack(states[1:], 1)

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Any = None, mask: Any = None
    ) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.decay is None else x + self.scan(x)
        x = x + self.blocks[0](x, mask=mask)
        return nn.functional.cross_entropy(
            (x @ self.embedding.weight.T).flatten(0, 1), labels.flatten()
        )

    def flops_per_token(self, context: int | None = None) -> float:
        return 1.0


def mixing(folder: Path) -> dict[str, Any]:
    """What becomes of models that mix tokens by more than attention, and of
    those that only might."""

    class Known(Hybrid):
        shares_sequences = True

    tasks = {"recurrence": LanguageModel(Hybrid(0.9)), "without": LanguageModel(Hybrid(None))}
    found: dict[str, Any] = {name: refused(task, folder) for name, task in tasks.items()}
    found["declared"] = refused(LanguageModel(Known(0.9)), folder)
    averaged = UNSHARED["a mean of earlier tokens beside shared attention"]
    manual = of(averaged(), ManualTask())
    found["by hand"] = [refused(manual, folder), manual.steps_taken]
    validating = {"limit_val_batches": 1, "num_sanity_val_steps": 1}
    found["validated"] = refused(of(averaged(), PlainTask()), folder, **validating)
    found["watched"] = [watched(folder, task) for task in (WatchfulTask(), DeclaredTask())]
    return found


def unshared(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """What becomes of models whose attention knows nothing of other devices, in training; of the
    last one in validation before it, and its losses where the strategy is set not to look. And of
    a step that steps its optimizer itself: refused, steps taken; with shared attention."""
    found: dict[str, Any] = {
        name: refused(of(make(), PlainTask()), folder) for name, make in UNSHARED.items()
    }
    last = UNSHARED["no attention"]
    validating = {"limit_val_batches": 1, "num_sanity_val_steps": 1}
    found["validated"] = refused(of(last(), PlainTask()), folder, **validating)
    told = of(last(), PlainTask())
    trainer(folder, max_steps=1, devices=2, strategy=strategy(check_attention=False)).fit(
        told, Loaders(8)
    )
    found["unchecked"] = told.losses
    manual = of(UNSHARED["no attention"](), ManualTask())
    return found, [refused(manual, folder), manual.steps_taken, refused(ManualTask(), folder)]


def strategy(degree: int | None = None, **options: Any) -> flashtrain.ContextParallelStrategy:
    return flashtrain.ContextParallelStrategy(degree, timeout_seconds=600, **options)


def four(folder: Path) -> None:
    """What each of four ranks does, FOLDER/RANK.json."""
    quiet()
    found: dict[str, Any] = {
        "twenty": twenty_steps(folder, devices=4, strategy=strategy(method="ulysses"))
    }
    # Two data ranks with a row each are one process with both.
    found["dp2 x cp2"] = whole_model(folder, 1, devices=4, strategy=strategy(2, method="ring"))
    for kind in ("selective", "full"):
        found[kind] = whole_model(
            folder, ROWS, MemorySavings(kind), devices=4, strategy=strategy(4, method="all-gather")
        )
    found["begun"] = begun(folder, 3, devices=4, strategy=strategy(4))
    found["attention"] = attention_ranks.found()
    report(folder, found)
    end()


def two(folder: Path, checkpoint: Path) -> None:
    """What each of two ranks does, FOLDER/RANK.json."""
    quiet()
    found: dict[str, Any] = {
        "resumed": resumed(folder, 6, checkpoint, devices=2, strategy=strategy(2))
    }
    found["twenty"] = twenty_steps(folder, devices=2, strategy=strategy())
    found["our task"] = our_task(folder, devices=2, strategy=strategy())
    gc.collect()
    found["left"] = sorted(
        type(x).__name__ for x in gc.get_objects() if isinstance(x, (ContextSequence, FSDPModule))
    )
    found["by hand"] = [by_hand(folder, how, devices=2, strategy=strategy()) for how in HOW]
    found["unshared"], found["unshared_by_hand"] = unshared(folder)
    found["mixing"] = mixing(folder)
    report(folder, found)
    end()


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def import_what_ranks_need() -> None:
    """What every rank would import again: checkpoints, and models of transformers."""
    import safetensors.torch  # noqa: F401
    import torch.distributed.checkpoint

    with torch.random.fork_rng():
        for make in UNSHARED.values():
            make()


def main(folder: Path) -> None:
    import_what_ranks_need()
    # What cannot end well waits for 20 seconds, in which the others have the processor.
    ends = [start(4, trouble, folder / "stuck", 2, partial(time.sleep, 600))]
    ends.append(start(2, trouble, folder / "dead", 1, partial(os._exit, 7)))
    fork(4, four, folder / "four")
    fork(2, two, folder / "two", folder / "four" / "begun.ckpt")
    for wait in ends:
        wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
