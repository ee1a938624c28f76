"""A linear layer whose products are computed in float8 while it trains, by torchao."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from flashtrain.models.trainable import Trainable
from flashtrain.training import float8


class TrainedInFloat8(Float8Linear):
    """torchao's layer in training, nn.Linear in evaluation.

    So a validation's loss is that of mode=evaluate and of an export, a prompt of any length
    generates, and context parallelism's probe sees no scale that tokens have in common.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.training else F.linear(input, self.weight, self.bias)


def convert_linears(model: Trainable, recipe: str) -> None:
    """Replace the layers that gain, in place; parameters stay the same. A second call changes
    nothing."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=float8.EMULATE)
    chosen = set(float8.split_linears(model, recipe)[0].values())
    plain = {one for one in chosen if type(one) is nn.Linear}
    for block in model.blocks:  # type: ignore[union-attr]
        convert_to_float8_training(
            block, module_filter_fn=lambda one, _: one in plain, config=config
        )
        for one in block.modules():
            if type(one) is Float8Linear:  # torchao's function makes its own class alone
                one.__class__ = TrainedInFloat8
                one.train(block.training)
