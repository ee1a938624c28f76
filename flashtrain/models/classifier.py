"""A plain Transformer encoder that classifies sequences of tokens or single pixels: no convolution, no patches.

    config = ClassifierConfig(classes=2, length=128 * 128, side=128)
    model = Classifier(config, attention="flash")
    logits = model(pixels)                                   # pixels (B, S) uint8 in raster order; logits (B, classes)

Shapes: B batch, S sequence, E embedding width, M masked tokens per row, C rows with masked tokens.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.models.attention import AnyMask, plan_mask
from flashtrain.models.block import Block, normalization
from flashtrain.models.classifier_config import DENSE, GREY_LEVELS, BlockPattern, ClassifierConfig, Pooling
from flashtrain.models.memory_savings import MemorySavings
from flashtrain.models.positions import (
    AxialRotaryPositions,
    LearnedPositions,
    RotaryPositions,
    check_learned,
    grown_grid,
)
from flashtrain_kernels import Documents, linear_cross_entropy, masks
from flashtrain_kernels.loss_head import IGNORED

INITIAL_STD = 0.1  # of embeddings
DARK = 8  # the brightest grey level of the background and of most of a shape's faint ring, which training may leave out
POSITION_TABLE = "position_embedding.weight"
PIXEL_PARTS = ("mask_embedding", "pixel_head.weight")
# Fields in which carry_weights allows a difference: they have no weights, or theirs are carried or initialized.
FREE = ("length", "side", "layers", "dropout", "grey_bins", "rope_base", "pooling", "pattern", "pattern_block",
        "pattern_local", "pattern_globals")  # fmt: skip


class Losses(NamedTuple):
    """Scalars of one batch: mean cross-entropies in nats of labels and of masked pixels (0 where none are masked), and
    the share of rows whose largest logit is the label's."""

    classification: Tensor
    pixels: Tensor
    correct: Tensor


class GreyEmbedding(nn.Module):
    """A grey level's vector: its value, normalized to [-1, 1], times one learned vector, plus another."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(embed))
        self.bias = nn.Parameter(torch.empty(embed))

    def forward(self, levels: Tensor) -> Tensor:
        """levels (B, S) integers 0..255 -> (B, S, E), in the weights' dtype also under autocast."""
        value = (levels.to(self.weight.dtype) / (GREY_LEVELS - 1) - 0.5) / 0.5
        return value[..., None] * self.weight + self.bias


class Classifier(nn.Module):
    """Embedding and positions, pre-norm encoder blocks (every token sees every token), norm, pooling, head.

    The head has one hidden layer of E with GELU. Everything inside runs under torch.compile(fullgraph=True).

    Args:
        attention: "flash", "sdpa" or "standard"; it changes speed and memory, not the result or the weights.

    Raises:
        UserError: An unknown attention.
    """

    def __init__(self, config: ClassifierConfig, attention: str = "flash") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        embed = config.embed
        self.embedding: nn.Module
        if config.inputs == "grey":
            self.embedding = GreyEmbedding(embed)
        else:
            rows = GREY_LEVELS if config.inputs == "grey-table" else config.vocab_size
            self.embedding = nn.Embedding(rows, embed)
        self.position_embedding = LearnedPositions(config.length, embed) if config.positions == "learned" else None
        self.mask_embedding = nn.Parameter(torch.empty(embed)) if config.grey_bins else None
        self.dropout = nn.Dropout(config.dropout)
        rotary = _rotary(config)
        self.blocks = nn.ModuleList(
            Block(
                embed,
                config.heads,
                ffn=config.ffn,
                norm=config.norm,
                activation=config.activation,
                dropout=config.dropout,
                causal=False,
                attention=attention,
                rotary=rotary,
            )
            for _ in range(config.layers)
        )
        self.final_norm = normalization(config.norm, embed, True)
        self.pooling = Pooling(config.pooling, embed)
        self.head = nn.Sequential(
            nn.Linear(embed if config.towers == 1 else 4 * embed, embed), nn.GELU(), nn.Linear(embed, config.classes)
        )
        self.pixel_head = nn.Linear(embed, config.grey_bins, bias=False) if config.grey_bins else None
        self.pattern = None
        if config.pattern != DENSE:
            self.pattern = BlockPattern(
                config.pattern,
                config.length,
                block=config.pattern_block,
                local=config.pattern_local,
                globals=config.pattern_globals,
                side=config.side,
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize: normal embeddings, layers as torch does, and those that write into the residual stream scaled by
        1/sqrt(2 layers) (Radford et al. 2019)."""
        for parameter in (*self.embedding.parameters(), self.mask_embedding):
            if parameter is not None:
                nn.init.normal_(parameter, std=INITIAL_STD)
        if self.position_embedding is not None:
            nn.init.normal_(self.position_embedding.weight, std=INITIAL_STD)
        with torch.no_grad():
            for block in self.blocks:
                for projection in block.residual_projections():  # type: ignore[operator]
                    projection.weight.mul_((2 * self.config.layers) ** -0.5)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (B, classes) of tokens (B, S), or (B, 2, S) with two towers; any integer dtype.

        Args:
            lengths: (B,) or (B, 2), the tokens of each row before its padding, at least 1 (None: no padding).

        Raises:
            UserError: Learned positions past `length`, or padding under a block pattern.
        """
        rows, row_lengths = _rows(tokens, lengths)
        return self.logits(self.hidden(rows, row_lengths), row_lengths)

    def hidden(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        masked: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The states (B, S, E) after the last norm. masked: (B, S) bool, the pixels whose level is hidden. positions:
        (B, S) int64, the pixels' numbers where the tokens are a selection (None: all, in order)."""
        length = tokens.shape[1]
        mask = self._mask(tokens, lengths)
        order, places = (None, None) if self.pattern is None else (self.pattern.order, self.pattern.places)
        if positions is None:
            positions = torch.arange(length, device=tokens.device)[None] if order is None else order[None]
        if order is not None:  # tiles reorder the tokens; each keeps its own position
            tokens = tokens[:, order]
            masked = None if masked is None else masked[:, order]
        x = self.embedding(tokens if self.config.inputs == "grey" else tokens.int())
        if masked is not None and self.mask_embedding is not None:
            x = torch.where(masked[..., None], self.mask_embedding, x)
        if self.position_embedding is not None:
            check_learned(length, self.config.length)
            x = x + self.position_embedding(positions)
        x = self.dropout(x)
        dropout = self.config.dropout if self.training else 0.0
        mask = plan_mask(mask, x, attention=self.attention, head_dim=self.config.head_dim, dropout=dropout)
        for block in self.blocks:
            x = block(x, positions=positions, mask=mask)
        x = self.final_norm(x)
        return x if places is None else x[:, places]

    def logits(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        """hidden (B, S, E) -> (B, classes); with two towers the two rows of a sample follow each other."""
        pooled = self.pooling(hidden, None if lengths is None else _is_real(hidden.shape[1], lengths))
        if self.config.towers == 2:
            first, second = pooled.unflatten(0, (-1, 2)).unbind(dim=1)
            pooled = torch.cat((first, second, first * second, first - second), dim=-1)
        return self.head(pooled)

    def losses(
        self,
        tokens: Tensor,
        labels: Tensor,
        lengths: Tensor | None = None,
        masked: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        copies: bool = True,
    ) -> Losses:
        """The losses of a batch, in float32 at least: tokens and lengths as in forward, labels (B,) int64.

        Args:
            masked: (C, M) int64, C at most B: the pixels or tokens of the first C rows to be predicted from the others
                (Devlin et al. 2019 for words; Amos et al. 2023, arXiv 2310.02980, for pixels), -1 for none.
            positions: As in hidden; only without masked.
            copies: Whether the masked rows are read in addition to the whole ones, from which labels are then
                predicted. Otherwise labels are predicted from masked rows too, and C = B.
        """
        rows, row_lengths = _rows(tokens, lengths)
        if masked is None:
            hidden = self.hidden(rows, row_lengths, positions=positions)
            pixels = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        else:
            (count, _), (batch, length) = masked.shape, rows.shape
            hides = torch.zeros((count, length + 1), dtype=torch.bool, device=rows.device)
            hides = hides.scatter(1, torch.where(masked < 0, length, masked), True)[:, :length]
            if copies:
                whole = torch.zeros((batch, length), dtype=torch.bool, device=rows.device)
                twice = None if row_lengths is None else torch.cat((row_lengths, row_lengths[:count]))
                both = self.hidden(torch.cat((rows, rows[:count])), twice, torch.cat((whole, hides)))
                hidden, reread = both[:batch], both[batch:]
            else:
                hidden = reread = self.hidden(rows, row_lengths, hides)
            pixels = self.pixel_loss(reread, rows[:count], masked)
        logits = self.logits(hidden, row_lengths)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        classification = F.cross_entropy(precise, labels)
        correct = (logits.argmax(dim=-1) == labels).to(precise.dtype).mean()
        return Losses(classification, pixels, correct)

    def pixel_loss(self, hidden: Tensor, levels: Tensor, masked: Tensor) -> Tensor:
        """Mean cross-entropy in nats of the masked grey levels' bins, or of the masked tokens: hidden (C, S, E), levels
        (C, S), masked (C, M)."""
        places = masked.clamp(min=0)
        states = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        labels = levels.gather(1, places).long()
        if self.config.inputs != "tokens":
            labels = labels * self.config.grey_bins // GREY_LEVELS
        head = cast(nn.Linear, self.pixel_head)
        return linear_cross_entropy(states, head.weight, torch.where(masked < 0, IGNORED, labels))

    def save_memory(self, savings: MemorySavings) -> None:
        """Use these savings of activation memory from now on."""
        for block in self.blocks:
            block.save_memory(savings)  # type: ignore[operator]

    def parameter_count(self) -> int:
        """All parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_sample(self, length: int | None = None) -> float:
        """FLOPs of forward and backward for one sample of `length` tokens (None: the config's).

        6 N S + 12 layers heads head_dim S^2 times the share of blocks computed, for each tower (Chowdhery et al. 2022,
        appendix B, not halved, since nothing is causal); N is the parameters of the blocks. Embeddings, pooling and a
        second reading with masked pixels are not counted.
        """
        config = self.config
        tokens = config.length if length is None else length
        multiplied = sum(parameter.numel() for parameter in self.blocks.parameters())
        density = 1.0 if self.pattern is None else self.pattern.density
        attention = 12.0 * config.layers * config.embed * tokens * tokens * density
        return config.towers * (6.0 * multiplied * tokens + attention)

    def _mask(self, tokens: Tensor, lengths: Tensor | None) -> AnyMask | None:
        if self.pattern is None:
            return None if lengths is None else _padding_mask(tokens.shape[1], lengths)
        if lengths is not None:
            raise UserError("block-sparse patterns need rows of equal length. Use pattern=dense.")
        return self.pattern()


def pixels_to_mask(
    rows: int, length: int, share: float, generator: torch.Generator, lengths: Tensor | None = None
) -> Tensor:
    """(rows, M) int64: a random selection of round(share * length) pixels in each row (at least 1), ascending.

    lengths: (rows,) of padded rows: the share applies to each row's own length, and -1 fills the rest. The result is on
    the generator's device.
    """
    count = min(length, max(1, round(share * length)))
    drawn = torch.rand((rows, length), generator=generator, device=generator.device)
    if lengths is None:
        return drawn.topk(count, dim=1).indices.sort(dim=1).values
    padding = torch.arange(length, device=drawn.device) >= lengths[:, None]
    places = drawn.masked_fill(padding, -1.0).topk(count, dim=1).indices
    wanted = (share * lengths).round().clamp(min=1)
    unwanted = torch.arange(count, device=drawn.device) >= wanted[:, None]
    places = places.masked_fill(unwanted, length).sort(dim=1).values
    return places.masked_fill(places == length, -1)


def pixels_to_read(levels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(B, count) int64, ascending: a random selection of each image's pixels (B, S), in which those above DARK take
    precedence. On the generator's device."""
    drawn = torch.rand(levels.shape, generator=generator, device=levels.device)
    return (drawn + (levels > DARK)).topk(count, dim=1).indices.sort(dim=1).values


def _rotary(config: ClassifierConfig) -> nn.Module | None:
    if config.positions == "axial":
        return AxialRotaryPositions(config.head_dim, math.isqrt(config.length), config.angle_base)
    if config.positions == "rotary":
        return RotaryPositions(config.head_dim, config.angle_base)
    return None


def _rows(tokens: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tokens (rows, S) and lengths (rows,), in which the two sequences of a sample are two consecutive rows."""
    return (tokens, lengths) if tokens.dim() == 2 else (tokens.flatten(0, 1), _flat(lengths))


def _flat(lengths: Tensor | None) -> Tensor | None:
    return None if lengths is None else lengths.flatten()


def _is_real(length: int, lengths: Tensor) -> Tensor:
    return torch.arange(length, device=lengths.device)[None] < lengths[:, None]


def _padding_mask(length: int, lengths: Tensor) -> AnyMask:
    """The mask under which padding sees nothing and is not seen: O(B S) memory, and padded tiles are skipped."""
    ends = torch.where(_is_real(length, lengths), lengths[:, None], 0).int()
    return masks.document(Documents(torch.zeros_like(ends), ends), causal=False)


def carry_weights(model: Classifier, config: ClassifierConfig, state: dict[str, Tensor]) -> None:
    """Load into `model` the weights of a model of `config`, for a curriculum's next stage.

    Learned positions of square images are copied grid-wise to the new side (positions.grown_grid). Pixel heads that
    only one of the two models has are dropped, or stay as initialized. Additional layers come last and change nothing
    at first: their output projections are zero.

    Raises:
        UserError: The models differ in other fields than FREE, or the new one has fewer layers.
    """
    expected, given = asdict(model.config), asdict(config)
    differing = [name for name in expected if name not in FREE and expected[name] != given[name]]
    if ("attention" in (config.pooling, model.config.pooling)) and config.pooling != model.config.pooling:
        differing.append("pooling")
    if model.config.layers < config.layers:
        differing.append("layers")
    if differing:
        parts = ", ".join(f"{name}={given[name]} (expected {expected[name]})" for name in differing)
        raise UserError(f"the weights belong to another model: {parts}.")
    state = dict(state)
    if POSITION_TABLE in state and model.config.length != config.length and model.config.side is not None:
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
    model.load_state_dict(state)
