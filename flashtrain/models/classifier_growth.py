"""A classifier's weights made ready for a larger image, for a deeper model, or for one that predicts pixels.

E embedding width.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.axial_positions import grown_grid
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig

POSITION_TABLE = "position_embedding.weight"
PIXEL_PARTS = ("mask_embedding", "pixel_head.weight")
# What may differ: it has no weights, or its weights are carried or started anew.
FREE = ("length", "side", "layers", "dropout", "grey_bins", "rope_base", "pooling", "pattern", "pattern_block",
        "pattern_local", "pattern_globals")  # fmt: skip


def carry_weights(model: Classifier, config: ClassifierConfig, state: dict[str, Tensor]) -> None:
    """Load into `model` the weights of a model of `config`, as a curriculum's next stage starts from the last one's.

    Learned positions of square images are copied grid-wise to the new side (axial_positions.grown_grid); rotary ones
    have nothing to carry. Heads for pixels that one of the two has not are dropped, or stay as they were made. Layers
    that are more than there were come last and change nothing at first: what they write begins as zeros.
    UserError: models that differ in more than that, fewer layers.
    """
    wanted, given = asdict(model.config), asdict(config)
    differing = [name for name in wanted if name not in FREE and wanted[name] != given[name]]
    if ("attention" in (config.pooling, model.config.pooling)) and config.pooling != model.config.pooling:
        differing.append("pooling")
    if model.config.layers < config.layers:
        differing.append("layers")
    if differing:
        parts = ", ".join(f"{name} is {given[name]} there and {wanted[name]} here" for name in differing)
        raise UserError(f"these weights are of another model: {parts}.")
    state = dict(state)
    if POSITION_TABLE in state and model.config.length != config.length:
        if model.config.side is None or config.side is None:
            raise UserError(
                f"{config.length} learned positions for sequences of {model.config.length}. Possible: the same length."
            )
        state[POSITION_TABLE] = grown_grid(state[POSITION_TABLE], model.config.side)
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
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"these weights do not fit their model: {str(error).splitlines()[-1].strip()}") from error
