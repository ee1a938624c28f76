"""GPT-2 in plain PyTorch, as anyone would write it for torch.compile: the implementation to be faster than; and
model=plain, which trains it by the same command, so that loss curves can be laid on ours:

    python -m flashtrain -m recipe=gpt2 model=gpt2,plain trainer.micro_batch=32

It starts from the very weights that model=gpt2 starts from with the same seed, and sees the same batches. PlainGPT uses
nothing of flashtrain's models, so that nothing done to them changes it.

B batch, S sequence, H heads, D head dimension, E embedding width, V rows of the embedding table.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2, GPT2Config
from flashtrain.models.trainable import Trainable
from flashtrain.settings.groups import ModelSettings
from flashtrain.tasks.components import decoder_config
from flashtrain_kernels import Mask


class PlainGPT(nn.Module):
    """A GPT-2 decoder without dropout. attention: "sdpa" or "standard" (scores, softmax and weights are S x S)."""

    def __init__(
        self, *, layers: int, heads: int, embed: int, context: int, vocab_rows: int, attention: str = "sdpa"
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_rows, embed)
        self.positions = nn.Embedding(context, embed)
        self.blocks = nn.ModuleList(PlainBlock(embed, heads, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(embed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if writes_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @classmethod
    def of(cls, config: GPT2Config, attention: str) -> PlainGPT:
        """One of a configuration's shape."""
        layers, heads, embed = config.layers, config.heads, config.embed
        shape = {"layers": layers, "heads": heads, "embed": embed, "context": config.context}
        return cls(**shape, vocab_rows=config.vocab_rows, attention=attention)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, S, V) of tokens (B, S)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in nats of labels (B, S), which are shifted already, from float32 logits or wider."""
        logits = self(tokens).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, embed: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads = heads
        self.attend = {"sdpa": sdpa, "standard": written_out}[attention]
        self.norm1 = nn.LayerNorm(embed)
        self.qkv = nn.Linear(embed, 3 * embed)
        self.out = nn.Linear(embed, embed)
        self.norm2 = nn.LayerNorm(embed)
        self.up = nn.Linear(embed, 4 * embed)
        self.down = nn.Linear(4 * embed, embed)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) -> (B, S, E)."""
        # three tensors (B, H, S, D)
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's own kernels; q, k, v and the result (B, H, S, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with the S x S matrix stored, as before FlashAttention (Dao et al. 2022, Algorithm 0)."""
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype) @ v


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
        self.inner = PlainGPT.of(config, "standard" if attention == "standard" else "sdpa")
        copy_weights(start, self.inner)

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats of labels (B, S) after tokens (B, S). UserError: a mask or positions."""
        if mask is not None or positions is not None:
            raise UserError(
                "model=plain sees whole rows only. Possible: mask=causal and data.document_mask=false, or model=gpt2."
            )
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
