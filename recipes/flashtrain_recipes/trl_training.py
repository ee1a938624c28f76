"""TRL's SFTTrainer on what a finished run of recipe=sft on one device read: the same packed
input_ids and position_ids, model, optimizer and schedule. Needs trl.

    python -m flashtrain_recipes.trl_training RUN [ATTENTION]    # writes RUN/trl/result.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from flashtrain.command.modes import on_this_machine
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import read_settings, read_summary
from flashtrain.report.rows import RESULT, write_result
from flashtrain.tasks.language.evaluate import read_model
from flashtrain.tasks.language.prepare import make_data
from flashtrain.tasks.optimization import optimization_options
from flashtrain.training.metrics_file import METRICS, STEP, read_metrics


def main(run: str, attention: str = "sdpa") -> None:
    """Train with transformers' attention of this name; print and write a row of either trainer."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    folder = Path(run)
    settings, hardware = on_this_machine(read_settings(folder))
    ours, gpu = read_summary(folder), hardware.kind == "cuda"
    if ours["devices"] > 1:
        raise UserError(f"RUN={run} has trained on {ours['devices']} devices: expected one device.")
    settings.trainer.steps, settings.trainer.epochs = ours["steps"], None
    data, times = make_data(settings, hardware), []
    data.prepare_data()
    data.setup()
    data.batch_size, data.accumulate = ours["micro_batch"], ours["batch"] // ours["micro_batch"]

    def batches() -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(data.train_dataloader()):
            if number % data.accumulate == 0:  # the loss of the step before has been logged
                times.append(time.perf_counter())
            labels = torch.full_like(batch["labels"], -100)  # of a token itself, as theirs are
            labels[:, 1:] = batch["labels"][:, :-1]
            positions = batch["positions"].long()
            made = {"input_ids": batch["tokens"], "position_ids": positions, "labels": labels}
            # Flash attention tells documents apart in a single row only.
            yield {key: x.view(1, -1) for key, x in made.items()} if "flash" in attention else made

    class SameBatches(trl.SFTTrainer):
        def get_train_dataloader(self) -> Any:
            return batches()

    module: Any = read_model(settings, hardware).model.module
    module.set_attn_implementation(attention)
    make = optimization_options(settings)
    optimizer = make["make_optimizer"](module)
    saved = "gradient checkpointing" if "checkpointing" in ours["memory"] else "none"
    options = trl.SFTConfig(
        str(folder / "trl"), max_steps=ours["steps"], logging_steps=1, save_strategy="no",
        report_to="none", bf16=gpu, use_cpu=not gpu, max_length=None, remove_unused_columns=False,
        per_device_train_batch_size=data.batch_size, gradient_accumulation_steps=data.accumulate,
        max_grad_norm=make["gradient_clip"], gradient_checkpointing=saved != "none",
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    unread = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    trainer = SameBatches(module, args=options, train_dataset=unread, processing_class=tokenizer,
                          optimizers=(optimizer, make["make_schedule"](optimizer)))  # fmt: skip
    trainer.train()
    all_theirs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    logged = [row for row in read_metrics(folder / METRICS) if "train_loss" in row]
    own, theirs = zip(*((row["train_loss"], all_theirs[row[STEP]]) for row in logged), strict=True)
    timed = times[len(times) // 10 :]  # without warm-up
    rate = settings.trainer.tokens_per_step * (len(timed) - 1) / (timed[-1] - timed[0])
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else None
    same = {key: ours[key] for key in ("model", "context", "steps", "micro_batch")}
    rows = [
        {"implementation": name, **same, "memory": memory, "tokens_per_second": speed,
         "peak_memory_gib": peak, "train_loss_mean": fmean(losses), "train_loss": losses[-1]}
        for name, losses, memory, speed, peak in (
            ("flashtrain", own, ours["memory"], ours["tokens_per_second"], ours["peak_memory_gib"]),
            (f"TRL {trl.__version__}, {attention}", theirs, saved, rate, peak),
        )
    ]  # fmt: skip
    print(*rows, sep="\n")
    command = f"python -m flashtrain_recipes.trl_training {run} {attention}"
    write_result(folder / "trl" / RESULT, settings.recipe, command, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
