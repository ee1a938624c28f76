"""Evaluate, use or export a trained language model: mode=evaluate, generate and export."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flashtrain.data.chat_datamodule import ChatDataModule
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.packing import Batch
from flashtrain.data.token_ids import TokenIds
from flashtrain.data.tokenizers import NONE, Tokenizer, TokenizerSpec, make_tokenizer
from flashtrain.folders.run_folder import CONFIG_FILE, read_settings
from flashtrain.mode import mode_of
from flashtrain.settings.data import DataSettings
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.tasks.held_out import score
from flashtrain.tasks.language.exports import export
from flashtrain.tasks.language.generate import continue_text, converse
from flashtrain.tasks.language.prepare import make_data, model_builder
from flashtrain.tasks.language.push import make_repository, push
from flashtrain.tasks.language.starting_weights import run_of_weights, tokenizer_of_weights
from flashtrain.tasks.language.trained import load_trained, move
from flashtrain.tasks.text_data import make_source, make_tokenizer_spec
from flashtrain.training.hardware import Hardware
from flashtrain_kernels.loss_head import IGNORED

MAX_BATCH = 8  # rows of a micro-batch; on a CPU 1, since lines of progress come between them
WORDS = "loss {validation_loss:.4f}, perplexity {perplexity:.2f} a "
BITS = ", {bits_per_byte:.4f} bits a byte ({predicted_bytes:,} bytes of text are predicted)"


def run_language_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Run mode=evaluate, generate, export or a registered mode of checkpoints; return the
    results (Task.run_mode)."""
    mode = mode_of(settings)
    if mode is not None:
        return mode.run_checkpoint(settings, hardware)
    if settings.mode == "export":
        if settings.export.push is not None:
            make_repository(settings.export.push)
        trained = load_trained(
            str(settings.checkpoint), attention=hardware.attention, settings=settings
        )
        folder = export(trained, settings)
        if (name := settings.export.push) is not None:
            push(folder, name, trained)
        return {"folder": folder}
    trained = read_model(settings, hardware)
    if settings.mode == "generate" and settings.prompt == "-":
        converse(trained.model, trained.tokenizer, settings)
        return {}
    if settings.mode == "generate":
        return {"text": continue_text(trained.model, trained.tokenizer, settings)}
    data = held_out_data(trained, settings, hardware)
    data.batch_size = min(data.batch_size, MAX_BATCH if hardware.kind == "cuda" else 1)
    # Where a conversation sees others, which it sees depends on the length of a row.
    if isinstance(data, ChatDataModule) and settings.applied_mask.documents:
        data.short_rows = True
    task = LanguageModel(
        trained.model,
        document_mask=settings.applied_mask.documents,
        mask=make_mask(settings.applied_mask),
    )
    predicted: Counter[int] = Counter()  # labels, by token

    def count(outputs: Any, batch: Batch, *_: Any) -> None:
        predicted.update(batch["labels"][batch["labels"] != IGNORED].tolist())

    def measures(loss: float) -> dict[str, float]:
        # Infinite where it is too large for float32.
        found = {"perplexity": float(torch.exp(torch.tensor(loss)))}
        if has_bytes:
            size = trained.tokenizer.text_bytes(predicted)
            bits = loss * predicted.total() / math.log(2)
            found |= {"bits_per_byte": bits / size if size else math.inf, "predicted_bytes": size}
        return found

    task.on_validation_batch_end = count  # type: ignore[assignment, method-assign]
    has_bytes = hasattr(trained.tokenizer, "text_bytes")  # ids without a text have none
    unit = "byte" if trained.tokenizer.kind == "bytes" else "token"
    words = f"{WORDS}{unit}{BITS if has_bytes else ''}"
    return score(trained, task, data, hardware, words=words, measures=measures)


def held_out_data(trained: TrainedModel, settings: Settings, hardware: Hardware) -> TextDataModule:
    """Return the data module that holds out the text on which a trained model is scored, in the
    model's tokens."""
    whole = settings.data.validation_fraction == 1
    data = make_data(settings, hardware, trained.tokenizer if whole else None)
    # Trained on this text, if it is the run's.
    if not whole and settings.data.tokenizer == "bpe" and (trained.folder / CONFIG_FILE).is_file():
        same = _text(settings.data) == _text(read_settings(trained.folder).data)
        if same:
            data.prepare_data()
        if not same or data.tokenizer.fingerprint() != trained.tokenizer.fingerprint():
            return make_data(settings, hardware, trained.tokenizer)
    return data


def read_model(settings: Settings, hardware: Hardware) -> TrainedModel:
    """Load the model of `checkpoint` or, without one, of `weights` or model.path,
    on the machine's device."""
    if settings.checkpoint is not None:
        found = load_trained(settings.checkpoint, attention=hardware.attention, settings=settings)
    else:
        path = run_of_weights(settings.weights) or Path(
            settings.weights or settings.model.path or ""
        )
        build, tokenizer = model_builder(settings), _tokenizer(settings)
        model = build(vocab_size=tokenizer.vocab_size, attention=hardware.attention)
        model.keep_in(hardware.precision)
        model.materialise(torch.device(hardware.kind))
        found = TrainedModel(model.eval(), tokenizer, settings, path, path, 0)
    found.model = move(found.model, hardware.kind, hardware.precision)
    return found


def _tokenizer(settings: Settings) -> Tokenizer:
    """Return the tokenizer for a model without a checkpoint: that of the run that `weights` names,
    else that of data.tokenizer."""
    data = settings.data
    own = tokenizer_of_weights(settings.weights, begin_of_text=data.begin_of_text)
    found = own or make_tokenizer_spec(data, settings.model.path)
    if not isinstance(found, TokenizerSpec):
        return found
    if found.kind == NONE:
        return TokenIds(data.vocab_size, data.end_of_text)
    return make_tokenizer(found, getattr(make_source(data), "documents", tuple))


def _text(data: DataSettings) -> dict[str, Any]:
    """Return, by name, the settings of `data` that decide which text is read and how a tokenizer is
    trained on it."""
    others = ("begin_of_text", "document_mask", "split_context", "workers", "cache_dir")
    return {
        name: value
        for name, value in asdict(data).items()
        if name not in others and "validation" not in name
    }
