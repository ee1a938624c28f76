"""What each of several gloo ranks does for test_masked_ranks.py; run as a script, which forks them.

    python masked_ranks.py FOLDER

Two steps; then two more, resumed. Each rank writes FOLDER/ranks/RANK.json: of both parts what it read, its losses, and
the accuracy of the last validation.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from ranks import fork

from flashtrain.data.balance import Cost
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.distributed.strategies import make_strategy
from flashtrain.models import Bert, BertConfig
from flashtrain.tasks import MaskedLanguageModel

RANKS = 3
LONGEST = 256
CONFIG = BertConfig.of_size("tiny", vocab_size=261, context=LONGEST)
COST = Cost(CONFIG.cost_per_token(0.15), CONFIG.cost_per_pair())


class HeavyTailed:
    """One text of paragraphs whose lengths have a heavy tail (Pareto, index 1.2)."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        lengths = np.clip(20 * (1 + random.pareto(1.2, 1500)), 5, LONGEST - 4).astype(int)
        self.texts = ["\n\n".join(("word " * 60)[:length].strip() for length in part) for part in np.split(lengths, 5)]

    def describe(self) -> str:
        return "paragraphs"

    def fingerprint(self) -> str:
        return "paragraphs"

    def documents(self):
        yield from self.texts

    def approximate_bytes(self) -> int:
        return sum(map(len, self.texts))


class Reads(pl.Callback):
    """The lengths of each micro-batch's samples, and the loss of each step."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        lengths = batch["cu_seqlens"].diff()
        self.lengths.append(lengths[lengths > 0].tolist())
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.losses.append(trainer.callback_metrics["train_loss"].item())


def fit(folder: Path, steps: int, resume: Path | None, devices: int, accumulate: int) -> dict[str, Any]:
    """Train, and say what was read."""
    torch.manual_seed(0)
    task = MaskedLanguageModel(Bert(CONFIG, "sdpa"))
    data = MaskedTextDataModule(
        HeavyTailed(), "bytes", LONGEST, 2048, cost=COST, total_steps=6, accumulate=accumulate, shortest=4,
        validation_fraction=0.2, cache_dir=folder,
    )  # fmt: skip
    reads = Reads()
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False,
        strategy=make_strategy("auto", devices=devices, accelerator="cpu"), enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, num_sanity_val_steps=0, callbacks=[reads],
        accumulate_grad_batches=accumulate, default_root_dir=folder, val_check_interval=steps * accumulate,
    )  # fmt: skip
    trainer.fit(task, datamodule=data, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    sampler = data._train_loader.steps
    begin = int(resume is not None) * 2 * accumulate
    rows = [row.numbers for row in list(iterate(sampler, begin, steps * accumulate))]
    return {
        "lengths": reads.lengths,
        "losses": reads.losses,
        "rows": rows,
        "accuracy": task.validation_accuracy,
        "state": {k: v for k, v in data._train_loader.state_dict().items() if k != "accumulate"},
    }


def iterate(sampler: Any, begin: int, end: int) -> Any:
    """The rows of these micro-batches."""
    sampler.begin, sampler.end = begin, end
    return iter(sampler)


def train(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    begun = fit(folder, 2, None, devices=ranks, accumulate=1)
    resumed = fit(folder, 4, folder / "last.ckpt", devices=ranks, accumulate=1)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps([begun, resumed]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # gloo's threads abort a process that exits with them


def main(folder: Path) -> None:
    folder.mkdir()
    (folder / "codes.json").write_text(json.dumps(fork(RANKS, train, folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "ranks")
