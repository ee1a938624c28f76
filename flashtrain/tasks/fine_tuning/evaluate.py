"""Evaluate or export a fine-tuned BERT: mode=evaluate and mode=export."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flashtrain.announce import say
from flashtrain.data.sequences import SequenceDataModule
from flashtrain.data.tokenizers import load_tokenizer
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.folders.new_folder import new_folder
from flashtrain.folders.run_folder import BEST, TOKENIZER, find_checkpoint, read_settings
from flashtrain.integrations import save_bert_classifier
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks import FineTuning
from flashtrain.tasks.fine_tuning.prepare import SPECIAL_COUNT, choose_head_batching, make_head
from flashtrain.tasks.fine_tuning.splits import make_source
from flashtrain.tasks.fine_tuning.task import score_of
from flashtrain.tasks.masked_language.trained import save_encoder_tokenizer, special_tokens
from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.checkpoints import read_checkpoint, weights_in
from flashtrain.training.hardware import Hardware


def load_fine_tuned(settings: Settings, hardware: Hardware) -> TrainedModel:
    """Load the model of settings.checkpoint, on the machine's device in evaluation mode.

    The tokenizer is None for a model that was trained on synthetic documents.
    """
    folder, path = find_checkpoint(str(settings.checkpoint), prefer=BEST)
    saved = read_checkpoint(path)
    shape, names = saved["flashtrain"]["shape"], {field.name for field in fields(BertConfig)}
    config = BertConfig(**{name: value for name, value in shape.items() if name in names})
    model = make_head(settings, hardware, config, len(shape["labels"]))
    model.load_state_dict(weights_in(saved, path))
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).is_dir() else None
    model = model.eval().to(hardware.kind)
    return TrainedModel(
        model, tokenizer, settings, folder, path, saved["global_step"], shape["labels"]
    )


def run_fine_tuning_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Run mode=evaluate or export of a fine-tuned BERT, and return the results by
    name (see Task.run_mode).

    Those of evaluate are the metrics on the test texts or, without any, on the held-out ones; if
    the settings name other texts than the run's, on their test texts or, without any, on all.
    """
    trained = load_fine_tuned(settings, hardware)
    if settings.mode == "export":
        return _export(trained)
    requested = settings.finetune
    own = read_settings(trained.folder).finetune
    others = any(
        getattr(requested, name) != getattr(own, name) for name in ("path", "name", "config")
    )
    source = make_source(
        settings,
        tokenizer=trained.tokenizer,
        label_names=trained.labels,
        only_test=others and requested.data != "synthetic",
    )
    task = FineTuning(trained.model, requested.target)
    trainer = evaluating_trainer(hardware)
    data = SequenceDataModule(
        source, choose_head_batching(settings, hardware, trained.model).micro_batch
    )
    evaluate = trainer.test if source.scored == "test" else trainer.validate
    (found,) = evaluate(task, data, verbose=False)
    row = {
        task.score_name: found[f"{source.scored}_{task.score_name}"],
        "best_micro_f1": source.bound,
    }
    say(
        f"{trained.checkpoint} (step {trained.step}): {score_of(row)}, loss "
        f"{found[f'{source.scored}_loss']:.4f} on {len(source.samples[source.scored]):,} "
        f"{source.scored} texts"
    )
    return dict(found)


def _export(trained: TrainedModel) -> dict[str, Any]:
    """Write the weights in Hugging Face's layout, and return {"folder": ...}. Raises UserError for
    a model that the layout cannot hold."""
    tokenizer = trained.tokenizer
    config = trained.model.encoder.config
    words = "it has no tokenizer"
    special = (
        special_tokens(tokenizer)
        if tokenizer
        else SpecialTokens.past(config.vocab_size - SPECIAL_COUNT)
    )
    with new_folder(trained.folder, "export") as (made, folder):
        name = save_bert_classifier(trained.model, made, trained.labels, pad_token=special.pad)
        if tokenizer is not None:
            words = save_encoder_tokenizer(tokenizer, made, config)
    say(
        f"exported step {trained.step} to {folder} (transformers.{name}.from_pretrained reads it; "
        f"{words})"
    )
    return {"folder": folder}
