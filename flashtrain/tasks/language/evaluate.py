"""mode=evaluate, generate and export of a language model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.data.token_ids import TokenIds
from flashtrain.data.tokenizers import NONE, TokenizerSpec, make_tokenizer
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import CONFIG_FILE, read_settings
from flashtrain.settings.data import DataSettings
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.components import make_mask, make_source, make_tokenizer_spec
from flashtrain.tasks.held_out import scored_words, why_not_held_out
from flashtrain.tasks.language.exports import export
from flashtrain.tasks.language.prepare import continue_text, make_data, model_builder, tokenizer_of_weights
from flashtrain.tasks.language.trained import TrainedModel, load_trained, move, run_of_weights
from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.hardware import Hardware


def run_language_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Evaluate, generate or export."""
    if settings.mode == "export":
        trained = load_trained(str(settings.checkpoint), attention=hardware.attention, settings=settings)
        return {"folder": export(trained, settings)}
    trained = read_model(settings, hardware)
    if settings.mode == "generate":
        return {"text": continue_text(trained.model, trained.tokenizer, settings)}
    whole = settings.data.validation_fraction == 1
    data = make_data(settings, hardware, trained.tokenizer if whole else None)
    # Trained on this text, if it is the run's.
    if not whole and settings.data.tokenizer == "bpe" and (trained.folder / CONFIG_FILE).is_file():
        same = _text(settings.data) == _text(read_settings(trained.folder).data)
        if same:
            data.prepare_data()
        if not same or data.tokenizer.fingerprint() != trained.tokenizer.fingerprint():
            data = make_data(settings, hardware, trained.tokenizer)
    trainer = evaluating_trainer(hardware)
    data.batch_size = min(data.batch_size, 8)
    task = LanguageModel(trained.model, document_mask=settings.within_documents, mask=make_mask(settings))
    found = trainer.validate(task, data, verbose=False)
    if not found or "validation_loss" not in found[0]:
        raise UserError("nothing is held out to evaluate on: raise data.validation_fraction, or use more text.")
    loss = found[0]["validation_loss"]
    perplexity = float(torch.exp(torch.tensor(loss)))
    step = "" if settings.checkpoint is None else f" (step {trained.step})"
    counts, why_not = data.scored(), why_not_held_out(settings, trained.folder)
    words = scored_words(counts, data.source.describe(), why_not)
    claim = "held-out " if why_not is None else ""
    say(f"{trained.checkpoint}{step}: {claim}loss {loss:.4f}, perplexity {perplexity:.2f}, {words}")
    return {"validation_loss": loss, "perplexity": perplexity, "held_out": why_not is None, **counts}


def read_model(settings: Settings, hardware: Hardware) -> TrainedModel:
    """The model of `checkpoint`, or without one that of `weights` or model.path, on the machine."""
    if settings.checkpoint is not None:
        found = load_trained(settings.checkpoint, attention=hardware.attention, settings=settings)
    else:
        path = Path(settings.weights or settings.model.path or "")
        path = run_of_weights(settings) or path if settings.weights else path
        build, tokenizer = model_builder(settings), tokenizer_of_weights(settings) or make_tokenizer_spec(settings)
        if isinstance(tokenizer, TokenizerSpec):
            ids = TokenIds(settings.data.vocab_size, settings.data.end_of_text)
            own = tokenizer.kind != NONE
            tokenizer = make_tokenizer(tokenizer, getattr(make_source(settings), "documents", tuple)) if own else ids
        model = build(vocab_size=tokenizer.vocab_size, attention=hardware.attention)
        model.keep_in(hardware.precision)
        model.materialise(torch.device(hardware.kind))
        found = TrainedModel(model.eval(), tokenizer, path, path, 0)
    found.model = move(found.model, hardware.kind, hardware.precision)
    return found


def _text(data: DataSettings) -> dict[str, Any]:
    """The settings that say which text it is, and how a tokenizer is trained on it."""
    others = ("begin_of_text", "document_mask", "split_context", "workers", "cache_dir")
    return {name: value for name, value in asdict(data).items() if name not in others and "validation" not in name}
