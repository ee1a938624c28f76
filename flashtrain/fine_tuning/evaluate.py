"""mode=evaluate of a fine-tuned BERT: its score on test texts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytorch_lightning as pl

from flashtrain.announce import say
from flashtrain.data.tokenizers import load_tokenizer
from flashtrain.errors import UserError
from flashtrain.fine_tuning.build import (
    TASK,
    choose_head_batching,
    make_fine_tuning_task,
    make_head,
    make_labelled_data,
)
from flashtrain.fine_tuning.rows import score_of
from flashtrain.fine_tuning.splits import make_source
from flashtrain.models.bert_config import BertConfig
from flashtrain.run_folder import BEST, TOKENIZER, find_checkpoint
from flashtrain.settings import Settings
from flashtrain.training.checkpoints import read_checkpoint, weights_in
from flashtrain.training.hardware import Hardware


def run_fine_tuning_mode(settings: Settings, hardware: Hardware) -> int:
    """Evaluate. Returns the exit status. UserError: a mode that fine-tuned models have not."""
    if settings.mode != "evaluate":
        raise UserError(
            f"mode={settings.mode} is not for fine-tuned classifiers: they have train, plan and evaluate (a BERT that "
            "was trained on masked text has mode=export)."
        )
    folder, path = find_checkpoint(str(settings.checkpoint), prefer=BEST)
    saved = read_checkpoint(path)
    notes = saved.get("flashtrain") or {}
    if notes.get("task") != TASK:
        raise UserError(f"{path} holds no fine-tuned BERT: it was not written by a run with task={TASK}.")
    shape: dict[str, Any] = dict(notes["shape"])
    labels = shape["labels"]
    config = BertConfig(**{field.name: shape[field.name] for field in fields(BertConfig) if field.name in shape})
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).is_dir() else None
    source = make_source(settings.finetune, settings.data, settings.context, tokenizer=tokenizer, label_names=labels)
    model = make_head(settings, hardware, config, len(labels))
    model.load_state_dict(weights_in(saved, path, prefix="model."))
    task = make_fine_tuning_task(settings, hardware, model)
    trainer = pl.Trainer(
        accelerator="gpu" if hardware.kind == "cuda" else "cpu",
        devices=1,
        precision=hardware.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    data = make_labelled_data(settings, hardware, source, choose_head_batching(settings, hardware, model))
    evaluate = trainer.test if source.scored == "test" else trainer.validate
    (found,) = evaluate(task, data, verbose=False)
    row = {task.score_name: found[f"{source.scored}_{task.score_name}"], "best_micro_f1": source.bound}
    say(
        f"{path} (step {saved.get('global_step', 0)}): {score_of(row)}, loss {found[f'{source.scored}_loss']:.4f} on "
        f"{len(source.samples[source.scored]):,} {source.scored} texts"
    )
    return 0
