"""mode=evaluate, generate and export of a language model."""

from __future__ import annotations

import torch

from flashtrain.announce import say
from flashtrain.folders.run_folder import new_folder
from flashtrain.integrations import save_decoder, save_tokenizer
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.language.prepare import continue_text, make_data
from flashtrain.tasks.language.trained import TrainedModel, load_trained, move
from flashtrain.tasks.training_task import evaluating_trainer
from flashtrain.training.hardware import Hardware


def run_language_mode(settings: Settings, hardware: Hardware) -> int:
    """Evaluate, generate or export. Returns the exit status."""
    trained = load_trained(str(settings.checkpoint), attention=hardware.attention, settings=settings)
    if settings.mode == "export":
        return _export(trained)
    trained.model = move(trained.model, hardware.kind, hardware.precision)
    if settings.mode == "generate":
        prompt = settings.prompt or settings.data.first_words
        print(continue_text(trained.model, trained.tokenizer, prompt, settings.generate, seed=settings.seed))
        return 0
    data = make_data(settings, hardware)
    trainer = evaluating_trainer(hardware)
    data.batch_size = min(data.batch_size, 8)
    task = LanguageModel(trained.model, document_mask=settings.data.document_mask)
    loss = trainer.validate(task, data, verbose=False)[0]["validation_loss"]
    perplexity = float(torch.exp(torch.tensor(loss)))
    say(f"{trained.checkpoint} (step {trained.step}): held-out loss {loss:.4f}, perplexity {perplexity:.2f}")
    return 0


def _export(trained: TrainedModel) -> int:
    """Write the weights as safetensors: in a layout of Hugging Face's where one can hold the model, else in our own."""
    shape = trained.model.shape
    context = shape.context if shape is not None and shape.positions == "learned" else None
    with new_folder(trained.folder, "export") as folder:
        how = save_decoder(trained.model, folder, end_of_text=trained.tokenizer.end_of_text)
        tokenizer = save_tokenizer(trained.tokenizer, folder, context=context)
    say(f"exported step {trained.step} to {folder} ({how}; {tokenizer})")
    return 0
