"""A trained decoder's configuration and weights, made ready for a longer context than it was trained with.

    config, state_dict = load_gpt2("gpt2")                                  # 1,024 learned positions
    config, state_dict = with_context(config, state_dict, 8192, interpolate=True)
    model = GPT2(config)
    model.load_state_dict(state_dict)

E embedding width, C positions of a learned table.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2Config
from flashtrain.models.positions import stretched

POSITION_TABLE = "position_embedding.weight"


def with_context(
    config: GPT2Config,
    state_dict: dict[str, Tensor],
    context: int,
    *,
    interpolate: bool = False,
    rope_base: float | None = None,
    rope_factor: float | None = None,
) -> tuple[GPT2Config, dict[str, Tensor]]:
    """The same model for sequences of up to `context` tokens; one that is no longer than the model's changes nothing.

    Learned positions (C, E): with `interpolate` the table is stretched to (context, E), without it UserError.
    Rotary positions have no longest position; rope_base and rope_factor (None: as they are) change their angles, and
    are a UserError with learned ones.
    """
    rotary = config.positions == "rotary"
    for name, given in (("rope_base", rope_base), ("rope_factor", rope_factor)):
        if given is not None and not rotary:
            raise UserError(f"{name} {given:g} for a model with learned positions. Possible: a model with rotary ones.")
    if rope_base is not None:
        config = replace(config, rope_base=rope_base)
    if rope_factor is not None:
        config = replace(config, rope_factor=rope_factor)
    if context <= config.context:
        return config, state_dict
    if not rotary:
        if not interpolate:
            raise UserError(
                f"{context} positions for a model with {config.context} learned ones. Possible: at most "
                f"{config.context} tokens, or interpolating the positions to the longer context."
            )
        state_dict = {**state_dict, POSITION_TABLE: stretched(state_dict[POSITION_TABLE], context)}
    return replace(config, context=context), state_dict
