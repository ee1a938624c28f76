"""Extension of a trained decoder to a longer context.

    config, state_dict = load_decoder("gpt2")                              # 1,024 learned positions
    config, state_dict = with_context(config, state_dict, 8192, interpolate=True)
    model = Decoder(config)
    model.load_state_dict(state_dict)

Shapes: E embedding width, C positions of a learned table.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.decoder_config import DecoderConfig

POSITION_TABLE = "position_embedding.weight"


def with_context(
    config: DecoderConfig,
    state_dict: dict[str, Tensor],
    context: int,
    *,
    interpolate: bool = False,
    rope_base: float | None = None,
    rope: str | None = None,
    rope_factor: float | None = None,
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Adapt a trained decoder's configuration and state dict to sequences of up to
    `context` tokens; return both.

    Args:
        config: The trained model's configuration.
        state_dict: The trained model's state dict, whose tensors are not changed.
        context: The new longest sequence in tokens; ignored if the model's own context is as long.
        interpolate: Whether to stretch learned positions (C, E) to (context, E);
            without it they do not fit.
        rope_base: New base of rotary positions (None: unchanged).
        rope, rope_factor: New scaling of rotary positions, a kind of RopeScaling (None: the
            model's, or else ntk) and its factor (None: unchanged).

    Raises:
        UserError: rope_base or rope_factor is given for a model with learned positions, or
            rope is not the model's.
    """
    rotary = config.positions == "rotary"
    for name, given in (("rope_base", rope_base), ("rope_factor", rope_factor)):
        if given is not None and not rotary:
            raise UserError(
                f"{name}={given:g} needs rotary positions, but this model has learned ones. "
                "Remove the setting."
            )
    if rope_base is not None:
        config = replace(config, rope_base=rope_base)
    config = replace(config, rope=config.rope.scaled(rope, rope_factor, config.context))
    if context <= config.context:
        return config, state_dict
    if not rotary and interpolate:
        state_dict = {**state_dict, POSITION_TABLE: stretched(state_dict[POSITION_TABLE], context)}
    return replace(config, context=context), state_dict


def stretched(table: Tensor, context: int) -> Tensor:
    """Interpolate a learned position table (C, E) linearly to (context, E), in its own dtype.

    Position p of the long context is position (C - 1) / (context - 1) * p of the trained one, so
    that the first and last rows stay and nothing is extrapolated (Dosovitskiy et al. 2021, section
    3.2, for images; for rotary positions Chen et al. 2023, "Position Interpolation"). The model
    needs further training with the new table.
    """
    columns = table.double().T[None]  # of float32 the places of a million would be too coarse
    found = F.interpolate(columns, size=context, mode="linear", align_corners=True)
    return found[0].T.to(table.dtype).contiguous()
