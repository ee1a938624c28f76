"""Transfer of a classifier's weights to the model of a curriculum's next stage."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig

PIXEL_PARTS = ("mask_embedding", "pixel_head.weight")
# Fields in which the two models may differ: they have no weights, or theirs are
# carried or initialized.
FREE = ("length", "side", "layers", "dropout", "grey_bins", "rope_base", "pooling", "pattern",
        "pattern_block",
        "pattern_local", "pattern_globals")  # fmt: skip


def carry_weights(model: Classifier, config: ClassifierConfig, state: dict[str, Tensor]) -> None:
    """Load the weights of a trained classifier into the classifier of a curriculum's next stage.

    Where grey_bins differs, the pixel head stays as initialized. Additional layers come last and
    change nothing at first: their output projections are zero.

    Args:
        model: The new model, which receives the weights.
        config: The trained model's configuration.
        state: The trained model's state dict, which is not changed.

    Raises:
        UserError: The configurations differ in other fields than FREE, or the new
            model has fewer layers.
    """
    expected, given = asdict(model.config), asdict(config)
    differing = [name for name in expected if name not in FREE and expected[name] != given[name]]
    if (
        "attention" in (config.pooling, model.config.pooling)
        and config.pooling != model.config.pooling
    ):
        differing.append("pooling")
    if config.positions == "learned" and model.config.length != config.length:
        differing.append("length")
    if model.config.layers < config.layers:
        differing.append("layers")
    if differing:
        parts = ", ".join(f"{name}={given[name]} (expected {expected[name]})" for name in differing)
        raise UserError(
            f"the weights belong to another model: {parts}. Use the settings of their training."
        )
    state = dict(state)
    if config.grey_bins != model.config.grey_bins:
        own = model.state_dict()
        state = {name: value for name, value in state.items() if name not in PIXEL_PARTS}
        state.update({name: own[name] for name in PIXEL_PARTS if name in own})
    for number in range(config.layers, model.config.layers):
        block = model.blocks[number]
        with torch.no_grad():
            for projection in block.residual_projections():  # type: ignore[operator]
                for parameter in projection.parameters():
                    parameter.zero_()
        state |= {f"blocks.{number}.{name}": value for name, value in block.state_dict().items()}
    model.load_state_dict(state)
