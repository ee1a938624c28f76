"""Evaluate or export a BERT trained on masked text: mode=evaluate and mode=export."""

from __future__ import annotations

from typing import Any

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.folders.new_folder import new_folder
from flashtrain.integrations import save_bert
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.held_out import score
from flashtrain.tasks.language.trained import move
from flashtrain.tasks.masked_language.prepare import make_masked_data
from flashtrain.tasks.masked_language.trained import (
    check_context,
    read_bert,
    save_encoder_tokenizer,
    special_tokens,
    tokenizer_of,
)
from flashtrain.training.hardware import Hardware

WORDS = "loss {validation_loss:.4f}, masked-language accuracy {validation_accuracy:.2%}"


def load_bert_run(settings: Settings, hardware: Hardware) -> TrainedModel:
    """Load the model of settings.checkpoint, on the machine's device in evaluation mode."""
    trained = read_bert(str(settings.checkpoint), settings, hardware.attention)
    trained.model = move(trained.model, hardware.kind, hardware.precision)
    return trained


def run_masked_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Run mode=evaluate or export of a BERT, and return the results by name (see Task.run_mode):
    of evaluate, loss and masked-language accuracy on the held-out samples."""
    if settings.mode == "export":
        return _export(settings)
    trained = load_bert_run(settings, hardware)
    config = trained.model.config
    check_context(config, settings.context, str(trained.checkpoint))
    data = make_masked_data(settings, hardware)
    data.accumulate = 1  # nothing is trained
    data.setup()
    if data.vocab_size != config.vocab_size:
        raise UserError(
            f"{trained.checkpoint} knows {config.vocab_size} tokens, and this text is made of "
            f"{data.vocab_size}. Set data.tokenizer to the tokenizer of that run."
        )
    task = MaskedLanguageModel(trained.model)
    return score(trained, task, data, hardware, words=WORDS)


def _export(settings: Settings) -> dict[str, Any]:
    """Write the weights as safetensors: in Hugging Face's layout if transformers has this BERT's
    architecture, else in flashtrain's; return {"folder": ...}."""
    trained = read_bert(str(settings.checkpoint), settings)
    tokenizer = tokenizer_of(trained)
    with new_folder(trained.folder, "export") as (made, folder):
        how = save_bert(trained.model, made, pad_token=special_tokens(tokenizer).pad)
        saved = save_encoder_tokenizer(tokenizer, made, trained.model.config)
    say(f"exported step {trained.step} to {folder} ({how}; {saved})")
    return {"folder": folder}
