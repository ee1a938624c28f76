"""The decoder that the settings group `model` names."""

from __future__ import annotations

from functools import partial

from flashtrain.models.gpt2 import GPT2
from flashtrain.models.gpt2_config import FAMILIES, DecoderConfig
from flashtrain.models.trainable import Trainable, as_trainable, check_contract
from flashtrain.registry import component, register
from flashtrain.settings.model import OWN_SIZES, ModelSettings


def decoder_config(family: str, settings: ModelSettings, *, vocab_size: int, context: int) -> DecoderConfig:
    """Return the configuration of flashtrain's own decoder: a family such as "gpt2", at the settings' size."""
    names = ("vocab_rows", "positions", "dropout", "rope_base", "rope_factor", *OWN_SIZES)
    own = {name: getattr(settings, name) for name in names}
    return DecoderConfig.of_size(settings.size, family, vocab_size=vocab_size, context=context, **own)


def _decoder(family: str, settings: ModelSettings, *, vocab_size: int, context: int, attention: str) -> GPT2:
    config = decoder_config(family, settings, vocab_size=vocab_size, context=context)
    return GPT2(config, attention=attention, residual=settings.residual)


for _family in FAMILIES:
    register("model", _family)(partial(_decoder, _family))


def make_model(settings: ModelSettings, *, vocab_size: int, context: int, attention: str) -> Trainable:
    """Build the model that the group `model` names, with random weights.

    Raises:
        UserError: the model lacks methods that training needs.
    """
    build = component("model", settings.name)
    model = build(settings, vocab_size=vocab_size, context=context, attention=attention)
    if isinstance(model, Trainable):
        check_contract(model, f"model={settings.name} ({type(model).__name__})")
    return as_trainable(model)
