"""A trained language model, read back from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashtrain.data.tokenizers import load_tokenizer, without_begin
from flashtrain.folders.run_folder import BEST, TOKENIZER, find_checkpoint, settings_at
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import FAMILIES, DecoderConfig
from flashtrain.models.trainable import Trainable
from flashtrain.registry import component
from flashtrain.settings.aliases import current_value
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.language.starting_weights import at_context
from flashtrain.training.checkpoints import read_checkpoint, weights_in


def load_trained(given: str, *, attention: str, settings: Settings | None = None) -> TrainedModel:
    """Load the model of a run's best checkpoint, or of the checkpoint given, on the
    CPU in evaluation mode.

    Args:
        given: a run folder, or a checkpoint in one.
        settings: the settings to use the model with, for example a longer context; None: the run's
            own.

    Raises:
        UserError: there is no such checkpoint, or its positions cannot be adapted to the context.
    """
    folder, path = find_checkpoint(given, prefer=BEST)
    saved = read_checkpoint(path)
    own = settings_at(folder, path)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    description, state = saved["flashtrain"], weights_in(saved, path)
    requested = settings or own
    if current_value("model.name", description["name"]) in FAMILIES:
        config = DecoderConfig.of_plain(description["shape"])
        if settings is not None:
            config, state = at_context(settings.model, settings.context, config, state, where=path)
        model: Trainable = Decoder(config, attention=attention, residual=requested.model.residual)
    else:
        if settings is not None:
            own = own.having(context=max(own.context, settings.context), model=settings.model)
        # A model with a configuration of its own takes the text's tokenizer, and
        # may know more tokens.
        sized = hasattr(component("model", own.model.name), "check")
        vocab_size = tokenizer.vocab_size if sized else description["vocab_size"]
        of_run = replace(own.model, adapter_path=None)  # the checkpoint has the adapter
        model = make_model(of_run, vocab_size=vocab_size, context=own.context, attention=attention)
        model.seed = own.seed  # an adapter's random base is in no checkpoint
    model.fill(state)
    if not requested.data.begin_of_text:
        tokenizer = without_begin(tokenizer)
    return TrainedModel(model.eval(), tokenizer, requested, folder, path, saved["global_step"])


def move(model: Any, kind: str, precision: str) -> Any:
    """Move a module to a device type such as "cuda", and to the dtype of a precision without
    autocast ("bf16-true")."""
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision)
    return model.to(device=kind, dtype=dtype)
