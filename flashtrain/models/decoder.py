"""GPT-2 (Radford et al. 2019) and, from the same block, a Llama-style decoder ("llama"), and
TransNormer (Qin et al. 2022).

    config = DecoderConfig.of_size("124m", vocab_size=50257, context=1024)
    model = Decoder(config, attention="flash")
    # tokens, labels (B, S) int64; labels[b, s] follows tokens[b, s]
    loss = model.loss(tokens, labels)

Shapes: B batch, S sequence, E embedding width, V rows of the embedding table (vocab_rows).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import one_of
from flashtrain.models.attention_functions import AnyMask
from flashtrain.models.block import INITIAL_STD, Block, make_blocks, norm_of, start_normal
from flashtrain.models.decoder_config import DecoderConfig
from flashtrain.models.key_value_cache import KeyValueCache, cache_bytes
from flashtrain.models.layer_masks import layer_masks
from flashtrain.models.positions import LearnedPositions, RotaryPositions, check_learned
from flashtrain.models.sharded_sequence import next_positions
from flashtrain.models.trainable import Trainable
from flashtrain.settings import options
from flashtrain_kernels import linear_cross_entropy
from flashtrain_kernels.environment import autocast_dtype

RESIDUALS = get_args(options.Residual)


class Decoder(Trainable):
    """A GPT-2 or Llama-style decoder: embedding, blocks, final norm, output head (tied to
    the embedding or not).

    Args:
        attention: "flash", "sdpa" or "standard"; it changes speed and memory, not the
            result or the weights.
        residual: Dtype of the residual stream under autocast: "weights" (the weights' own, float32)
            or "compute" (autocast's: half the traffic, and each block's sum is rounded to it).

    Raises:
        UserError: An unknown attention or residual.
    """

    generates = True

    def __init__(
        self, config: DecoderConfig, attention: str = "flash", residual: str = "compute"
    ) -> None:
        super().__init__()
        one_of("residual", residual, RESIDUALS)
        self.residual = residual
        self.config = config
        self.attention = attention
        self.decodes_rows = attention == "flash" and bool(cache_bytes(config.layers))
        self.token_embedding = nn.Embedding(config.vocab_rows, config.embed)
        learned = config.positions == "learned"
        self.position_embedding = (
            LearnedPositions(config.context, config.embed) if learned else None
        )
        self.dropout = nn.Dropout(config.dropout)
        rotary = partial(RotaryPositions, base=config.rope_base, scaling=config.rope)
        self.blocks = make_blocks(config, config.layers, attention=attention, rotary=rotary)
        self.final_norm = norm_of(config)
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.embed, config.vocab_rows, bias=False)
        )
        self._exact = type(self) is Decoder  # FSDP2 makes it another class
        self.reset_parameters()

    @property
    def shape(self) -> DecoderConfig:
        return self.config

    @property
    def shares_sequences(self) -> bool | None:
        return self._exact or super().shares_sequences

    def reset_parameters(self) -> None:
        """Initialize as GPT-2: weights normal(0, 0.02), biases 0, residual projections
        times 1/sqrt(2 layers)."""
        start_normal(self)
        for module in self.modules():
            if isinstance(module, Block):
                for projection in module.residual_projections():
                    nn.init.normal_(
                        projection.weight, std=INITIAL_STD / math.sqrt(2 * len(self.blocks))
                    )

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | None = None,
        cache: KeyValueCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Compute logits (B, S, V) for the token after each of tokens (B, S)
        int64; -inf past vocab_size.

        Args:
            positions: (B, S) integers (None: 0, 1, ..., or continued from the cache).
            mask: Which tokens each token sees, in place of the causal rule (see Attention.forward).
            cache: Keys and values of earlier tokens, from new_cache(); those of
                these tokens are appended.
            last_only: Whether to return the last token's logits alone, (B, 1, V).

        Raises:
            UserError: There are more tokens than learned positions or the cache allow, or the
                mask has other sizes.
        """
        hidden = self.hidden(tokens, positions=positions, mask=mask, cache=cache)
        return self.logits(hidden[:, -1:] if last_only else hidden)

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute the states (B, S, E) that the output head reads; arguments as in forward."""
        if self.position_embedding is not None:
            check_learned(
                tokens.shape[1] + (cache.length if cache is not None else 0), self.config.context
            )
        if positions is None:
            positions = next_positions(tokens.shape[1], cache, tokens.device)
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        x = self.dropout(x)
        if self.residual == "compute":
            x = x.to(autocast_dtype(x.device.type) or x.dtype)
        dropout = self.config.dropout if self.training else 0.0
        given: dict[str, Any] = {"attention": self.attention, "dropout": dropout}
        given |= {"positions": positions, "read": None if cache is None else cache.length}
        masks = layer_masks(mask, x, self.config.layers, **given)
        for index, (block, of_layer) in enumerate(zip(self.blocks, masks, strict=True)):
            layer_cache = cache.layers[index] if cache is not None else None
            x = block(x, positions=positions, mask=of_layer, cache=layer_cache)
        return self.final_norm(x)

    @property
    def output_weight(self) -> Tensor:
        """The output head's matrix (V, E): the embedding table unless untied."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits (B, S, V), -inf past vocab_size, from hidden (B, S, E)."""
        logits = F.linear(hidden, self.output_weight)
        if self.config.vocab_rows > self.config.vocab_size:
            # The logits of imported GPT-2 weights are far below 0, so that added rows of zeros
            # would win every softmax.
            padding = (
                torch.arange(self.config.vocab_rows, device=logits.device) >= self.config.vocab_size
            )
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        mask: AnyMask | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Compute the mean cross-entropy in nats over the labels that are not -100, a
        scalar; 0 without labels.

        The loss is float32 whatever the weights or autocast (float64 for a float64 model). The
        logits of at most a few thousand tokens are stored at a time. torch.compile(model.loss,
        fullgraph=True) works.

        Args:
            tokens: (B, S) int64.
            labels: (B, S) int64, already shifted: labels[b, s] is the token after tokens[b, s].
            positions, mask: As in forward.
            reduction: "mean", or "none" for each token's own, (B, S).
        """
        hidden = self.hidden(tokens, positions=positions, mask=mask)
        return linear_cross_entropy(
            hidden,
            self.output_weight,
            labels,
            vocab_size=self.config.vocab_size,
            chunk=self.savings.loss_chunk,
            reduction=reduction,
        )

    def new_cache(self, tokens: int | None = None) -> KeyValueCache:
        """Make an empty cache for `tokens` tokens (None: the context); the first
        append allocates its memory."""
        tokens = self.config.context if tokens is None else tokens
        return KeyValueCache(layer.mixer.new_cache(tokens) for layer in self.config.layers)

    def flops_per_token(self, context: int | None = None) -> float:
        """Return the FLOPs of forward and backward for one token in a sequence of `context`
        tokens (None: config's).

        6 N + 12 * layers * heads * head_dim * context / 2 (Chowdhery et al. 2022, appendix B;
        halved since half of the scores are masked). N is the parameters that multiply a token: all
        but the position table and an untied input embedding, which are looked up. Document masks,
        padding and recomputation are not considered.
        """
        config = self.config
        multiplied = self.parameter_count()
        if self.position_embedding is not None:
            multiplied -= self.position_embedding.weight.numel()
        if self.head is not None:
            multiplied -= self.token_embedding.weight.numel()
        length = config.context if context is None else context
        return 6.0 * multiplied + sum(layer.mixer.flops(length) for layer in config.layers)


GPT2 = Decoder  # its name when every decoder was a GPT-2
