"""The decoder that the settings group `model` names."""

from __future__ import annotations

from functools import partial

from flashtrain.errors import UserError
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import FAMILIES, SIZES, DecoderConfig
from flashtrain.models.trainable import Trainable, as_trainable, check_contract
from flashtrain.registry import component, register
from flashtrain.settings.mask import MaskSettings
from flashtrain.settings.model import OWN_SIZES, ModelSettings

# Masks under which a token sees the earlier ones of its row or document.
CAUSAL = ("causal", "document")


def decoder_config(
    family: str, settings: ModelSettings, *, vocab_size: int, context: int
) -> DecoderConfig:
    """Return the configuration of flashtrain's own decoder: a family such as "gpt2",
    at the settings' size."""
    names = ("vocab_rows", "positions", "dropout", "rope_base", "rope", "rope_factor", *OWN_SIZES)
    own = {name: getattr(settings, name) for name in names}
    return DecoderConfig.of_size(
        settings.size, family, vocab_size=vocab_size, context=context, **own
    )


def check_layers(model: ModelSettings, mask: MaskSettings, context: int) -> DecoderConfig | None:
    """Check the layers of flashtrain's own decoder that `model` names, and return its
    configuration; None for other models.

    Raises:
        UserError: sizes do not fit together, or a layer cannot compute the mask.
    """
    if model.name not in FAMILIES or model.size not in SIZES:
        return None
    config = decoder_config(model.name, model, vocab_size=1, context=context)
    causal = sorted({layer.mixer.kind for layer in config.layers if not layer.mixer.any_mask})
    if causal and mask.name not in CAUSAL:
        raise UserError(
            f"mask={mask.name} with layers of {', '.join(causal)}, which see all earlier tokens of "
            f"their document. Expected mask={' or '.join(CAUSAL)}."
        )
    return config


def _decoder(
    family: str, settings: ModelSettings, *, vocab_size: int, context: int, attention: str
) -> Decoder:
    config = decoder_config(family, settings, vocab_size=vocab_size, context=context)
    return Decoder(config, attention=attention, residual=settings.residual)


for _family in FAMILIES:
    register("model", _family)(partial(_decoder, _family))


def make_model(
    settings: ModelSettings, *, vocab_size: int, context: int, attention: str
) -> Trainable:
    """Build the model that the group `model` names, with random weights.

    Raises:
        UserError: the model lacks methods that training needs.
    """
    build = component("model", settings.name)
    model = build(settings, vocab_size=vocab_size, context=context, attention=attention)
    if isinstance(model, Trainable):
        check_contract(model, f"model={settings.name} ({type(model).__name__})")
    return as_trainable(model)
