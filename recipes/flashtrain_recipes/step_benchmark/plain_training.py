"""model=plain: the plain GPT-2 of plain_gpt.py trained by the same command, so that loss curves can be laid on ours.

    python -m flashtrain -m recipe=gpt2 model=gpt2,plain trainer.micro_batch=32

It starts from the very weights that model=gpt2 starts from with the same seed, and sees the same batches.

B batch, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2, GPT2Config
from flashtrain.models.trainable import Trainable
from flashtrain.run.components import decoder_config
from flashtrain.settings.settings import ModelSettings
from flashtrain_kernels import Mask
from flashtrain_recipes.step_benchmark.plain_gpt import PlainGPT


class PlainTrainable(Trainable):
    """PlainGPT with what a run asks of a model. attention: "standard" writes out the S x S matrix, any other is SDPA.

    UserError: a configuration that PlainGPT has no parts for.
    """

    def __init__(self, config: GPT2Config, attention: str) -> None:
        super().__init__()
        if config.positions != "learned" or config.dropout:
            raise UserError(
                f"model=plain with model.positions={config.positions} and model.dropout={config.dropout:g}. "
                "Possible: learned positions and no dropout."
            )
        self.config = config
        start = GPT2(config, attention="sdpa")  # first, so that it draws what model=gpt2 would draw
        self.inner = PlainGPT(
            layers=config.layers,
            heads=config.heads,
            embed=config.embed,
            context=config.context,
            vocab_rows=config.vocab_rows,
            attention="standard" if attention == "standard" else "sdpa",
        )
        copy_weights(start, self.inner)

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats of labels (B, S) after tokens (B, S). UserError: a mask or positions."""
        if mask is not None or positions is not None:
            raise UserError("model=plain sees whole rows only. Possible: data.document_mask=false, or model=gpt2.")
        return self.inner.loss(tokens, labels)

    def parameter_count(self) -> int:
        """All parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, context: int | None = None) -> float:
        """As GPT2.flops_per_token."""
        with torch.device("meta"):
            return GPT2(self.config, attention="sdpa").flops_per_token(context)


@torch.no_grad()
def copy_weights(source: GPT2, target: PlainGPT) -> None:
    """Give a PlainGPT the weights of a GPT2 of the same shape."""
    names = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(names.pop(_gpt2_name(name)))
    if names:
        raise ValueError(f"weights without a place in PlainGPT: {', '.join(names)}")


_PARTS = {
    "tokens": "token_embedding",
    "positions": "position_embedding",
    "norm": "final_norm",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
    "qkv": "attention.qkv",
    "out": "attention.output",
    "up": "feed_forward.up",
    "down": "feed_forward.down",
}


def _gpt2_name(plain: str) -> str:
    return ".".join(_PARTS.get(part, part) for part in plain.split("."))


def build_plain(settings: ModelSettings, *, vocab_size: int, context: int, attention: str) -> PlainTrainable:
    """The component model=plain."""
    return PlainTrainable(decoder_config("gpt2", settings, vocab_size=vocab_size, context=context), attention)
