"""mode=evaluate and mode=export of a fine-tuned BERT: its score on test texts, and its weights for transformers."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from flashtrain.announce import say
from flashtrain.data.tokenizers import Tokenizer, load_tokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, TOKENIZER, find_checkpoint, new_folder, read_settings
from flashtrain.integrations import save_bert_classifier
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.tasks.fine_tuning.prepare import (
    TASK,
    Head,
    choose_head_batching,
    make_fine_tuning_task,
    make_head,
    make_labelled_data,
)
from flashtrain.tasks.fine_tuning.splits import make_source
from flashtrain.tasks.fine_tuning.task import score_of
from flashtrain.tasks.masked_language.build import save_encoder_tokenizer, special_tokens
from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.checkpoints import read_checkpoint, weights_in
from flashtrain.training.hardware import Hardware

SPECIAL_COUNT = 4  # [PAD], [CLS], [SEP] and [MASK]


class Tuned(NamedTuple):
    """A fine-tuned model of a run, and what goes with it. tokenizer: None of made-up documents."""

    model: Head
    label_names: list[str]
    tokenizer: Tokenizer | None
    folder: Path
    path: Path
    step: int


def run_fine_tuning_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Evaluate or export."""
    tuned = read_tuned(settings, hardware)
    return _export(tuned) if settings.mode == "export" else _evaluate(tuned, settings, hardware)


def read_tuned(settings: Settings, hardware: Hardware) -> Tuned:
    """The model of settings.checkpoint, on the CPU. UserError: it holds no fine-tuned BERT."""
    folder, path = find_checkpoint(str(settings.checkpoint), prefer=BEST)
    saved = read_checkpoint(path)
    notes = saved.get("flashtrain") or {}
    if notes.get("task") != TASK:
        raise UserError(f"{path} holds no fine-tuned BERT: it was not written by a run with task={TASK}.")
    state = weights_in(saved, path, prefix="model.")
    shape, names = notes["shape"], {field.name for field in fields(BertConfig)}
    config = BertConfig(**{name: value for name, value in shape.items() if name in names})
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).is_dir() else None
    model = make_head(settings, hardware, config, len(shape["labels"]))
    model.load_state_dict(state)
    return Tuned(model, shape["labels"], tokenizer, folder, path, saved["global_step"])


def _evaluate(tuned: Tuned, settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """The score on test texts, or on those held out where there are none; of other texts than the run's, on all of
    those that are called test, or simply all."""
    trained_on = read_settings(tuned.folder).finetune
    asked = settings.finetune
    others = asked.data != "cues" and (asked.path, asked.name, asked.config) != (
        trained_on.path, trained_on.name, trained_on.config
    )  # fmt: skip
    source = make_source(
        settings.finetune,
        settings.data,
        settings.context,
        tokenizer=tuned.tokenizer,
        label_names=tuned.label_names,
        only_test=others,
    )
    task = make_fine_tuning_task(settings, hardware, tuned.model)
    trainer = evaluating_trainer(hardware)
    data = make_labelled_data(settings, hardware, source, choose_head_batching(settings, hardware, tuned.model))
    evaluate = trainer.test if source.scored == "test" else trainer.validate
    (found,) = evaluate(task, data, verbose=False)
    row = {task.score_name: found[f"{source.scored}_{task.score_name}"], "best_micro_f1": source.bound}
    say(
        f"{tuned.path} (step {tuned.step}): {score_of(row)}, loss {found[f'{source.scored}_loss']:.4f} on "
        f"{len(source.samples[source.scored]):,} {source.scored} texts"
    )
    return dict(found)


def _export(tuned: Tuned) -> dict[str, Any]:
    """Write the weights in Hugging Face's layout. UserError: a model that it cannot hold."""
    if tuned.tokenizer is None:
        special = SpecialTokens.past(tuned.model.encoder.config.vocab_size - SPECIAL_COUNT)
    else:
        special = special_tokens(tuned.tokenizer)
    with new_folder(tuned.folder, "export") as folder:
        name = save_bert_classifier(tuned.model, folder, tuned.label_names, pad_token=special.pad)
        if tuned.tokenizer is None:
            tokenizer = "it has no tokenizer: its documents were made up"
        else:
            tokenizer = save_encoder_tokenizer(tuned.tokenizer, folder, tuned.model.encoder.config)
    say(f"exported step {tuned.step} to {folder} (transformers.{name}.from_pretrained reads it; {tokenizer})")
    return {"folder": folder}
