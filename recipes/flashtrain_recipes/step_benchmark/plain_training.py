"""GPT-2 in plain PyTorch, as anyone would write it for torch.compile: a baseline that
flashtrain is compared with.

model=plain trains it by the same command as model=gpt2, from the same weights for equal seeds, to
compare losses: `python -m flashtrain -m recipe=gpt2 model=gpt2,plain trainer.micro_batch=32`. It
uses no layer of flashtrain, so that changes of those do not affect it.

B batch, S sequence, H heads, D head dimension, E embedding width, V rows of the embedding table.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.decoder import Decoder
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.trainable import Trainable
from flashtrain.settings.model import ModelSettings
from flashtrain.tasks.decoders import decoder_config
from flashtrain_kernels import Mask


class PlainGPT(Trainable):
    """A GPT-2 decoder without dropout. Its weights have the names of
    flashtrain.models.decoder.Decoder's.

    Args:
        attention: "sdpa" or "standard" (with the S x S matrix).
    """

    def __init__(self, shape: DecoderConfig, attention: str) -> None:
        super().__init__()
        self.config = shape
        self.token_embedding = nn.Embedding(shape.vocab_rows, shape.embed)
        self.position_embedding = nn.Embedding(shape.context, shape.embed)
        heads: Any = [layer.mixer for layer in shape.layers]
        self.blocks = nn.ModuleList(PlainBlock(shape.embed, one.heads, attention) for one in heads)
        self.final_norm = nn.LayerNorm(shape.embed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(
                    parameter,
                    std=0.02 / math.sqrt(2 * len(shape.layers)) if writes_residual else 0.02,
                )
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S)."""
        x = self.token_embedding(tokens) + self.position_embedding(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy, in nats, where labels[b, s] is the token after
        tokens[b, s], both (B, S).

        Raises:
            UserError: a mask or positions are given.
        """
        if mask is not None or positions is not None:
            raise UserError(
                "model=plain takes no mask and no positions: "
                "expected mask=causal and data.document_mask=false, or model=gpt2."
            )
        logits = self(tokens).flatten(0, 1)
        return F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten()
        )

    def flops_per_token(self, context: int | None = None) -> float:
        """Return the FLOPs per token, forward and backward, as
        Decoder.flops_per_token counts them."""
        with torch.device("meta"):
            return Decoder(self.config, attention="sdpa").flops_per_token(context)


class PlainBlock(nn.Module):
    """A Transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, embed: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads = heads
        self.attend = {"sdpa": sdpa, "standard": written_out}[attention]
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(embed, 3 * embed), "output": nn.Linear(embed, embed)}
        )
        self.feed_forward = nn.ModuleDict(
            {"up": nn.Linear(embed, 4 * embed), "down": nn.Linear(4 * embed, embed)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (B, S, E), of x (B, S, E)."""
        # three tensors (B, H, S, D)
        q, k, v = (
            self.attention["qkv"](self.attention_norm(x))
            .unflatten(2, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        x = x + self.attention["output"](self.attend(q, k, v).transpose(1, 2).flatten(2))
        wide = F.gelu(self.feed_forward["up"](self.feed_forward_norm(x)), approximate="tanh")
        return x + self.feed_forward["down"](wide)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by torch's own kernels; q, k, v and the result are (B, H, S, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention with the S x S matrix in memory; q, k, v and the
    result are (B, H, S, D)."""
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v


def build_plain(
    settings: ModelSettings, *, vocab_size: int, context: int, attention: str
) -> PlainGPT:
    """Build model=plain with the weights of model=gpt2.

    Args:
        attention: "standard" stores the S x S matrix, any other is SDPA.

    Raises:
        UserError: positions are not learned, or there is dropout, which PlainGPT does not have.
    """
    config = decoder_config("gpt2", settings, vocab_size=vocab_size, context=context)
    if config.positions != "learned" or config.dropout:
        raise UserError(
            f"model=plain with model.positions={config.positions} and "
            f"model.dropout={config.dropout:g}: expected learned positions and no dropout."
        )
    start = Decoder(config, attention="sdpa")  # first, so that it draws what model=gpt2 would draw
    plain = PlainGPT(config, "standard" if attention == "standard" else "sdpa")
    plain.load_state_dict(start.state_dict())
    return plain
