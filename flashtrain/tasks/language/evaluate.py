"""mode=evaluate, generate and export of a language model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.data.tokenizers import known_end
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import new_folder, read_settings
from flashtrain.integrations import save_decoder, save_tokenizer
from flashtrain.integrations.huggingface_folder import add_end_ids
from flashtrain.settings.groups import DataSettings
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.components import make_mask
from flashtrain.tasks.language.ends import turn_ends
from flashtrain.tasks.language.prepare import continue_text, make_data
from flashtrain.tasks.language.trained import TrainedModel, load_trained, move
from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.hardware import Hardware


def run_language_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Evaluate, generate or export."""
    trained = load_trained(str(settings.checkpoint), attention=hardware.attention, settings=settings)
    if settings.mode == "export":
        return _export(trained, settings)
    trained.model = move(trained.model, hardware.kind, hardware.precision)
    if settings.mode == "generate":
        return {"text": continue_text(trained.model, trained.tokenizer, settings)}
    data = make_data(settings, hardware)
    if settings.data.tokenizer == "bpe":  # trained on this text, if it is the run's
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
    say(f"{trained.checkpoint} (step {trained.step}): held-out loss {loss:.4f}, perplexity {perplexity:.2f}")
    return {"validation_loss": loss, "perplexity": perplexity}


def _text(data: DataSettings) -> dict[str, Any]:
    """The settings that say which text it is, and how a tokenizer is trained on it."""
    others = ("document_mask", "split_context", "workers", "cache_dir")
    return {name: value for name, value in asdict(data).items() if name not in others and "validation" not in name}


def _export(trained: TrainedModel, settings: Settings) -> dict[str, Any]:
    """Write the weights as safetensors: in a layout of Hugging Face's where one can hold the model, else in our own."""
    shape = trained.model.shape
    context = shape.context if shape is not None and shape.positions == "learned" else None
    with new_folder(trained.folder, "export") as folder:
        how = trained.model.save(folder)
        how = how or save_decoder(trained.model, folder, end_of_text=known_end(trained.tokenizer))
        add_end_ids(folder, turn_ends(trained.tokenizer, settings))
        tokenizer = save_tokenizer(trained.tokenizer, folder, context=context)
    say(f"exported step {trained.step} to {folder} ({how}; {tokenizer})")
    return {"folder": folder}
