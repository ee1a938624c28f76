"""Position encodings of tokens and pixels, learned or rotary.

Shapes: B batch, S sequence (pixels in raster order), N heads (query and key heads may be stacked),
D head dimension, E embedding width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError, above
from flashtrain.models.rope_scaling import RopeScaling

# The slowest pair of a head of 64 then turns once in 2 pi 100^(15/16) = 471 pixels: no two pixels
# of an image of side 256 look alike to it, and no pair turns too slowly to distinguish pixels.
AXIAL_BASE = 100.0


class RotaryPositions(nn.Module):
    """Rotary positions (Su et al. 2021, RoFormer): rotate the pair (i, i + D/2) of a head by
    position * base^(-2i/D).

    Every forward computes the angles from the positions, in float32 at least (float64 for float64
    inputs). So there is no table that a cast to bfloat16 would round, and no longest position.

    Args:
        head_dim: The head dimension D, an even number.
        base: The base of the angles in the original training, above 1.
        scaling: Their scaling to a longer context (None: none).
    """

    def __init__(
        self, head_dim: int, base: float = 10000.0, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.scaling = scaling or RopeScaling()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, S, N, D), in its dtype, by positions (B, S) or (1, S)
        of any integer dtype."""
        # ntk and no scaling keep float32's frequencies, which runs until December
        # 2026 were trained with.
        dtype = torch.float64
        if self.scaling.rope_type == "ntk":
            dtype = torch.promote_types(x.dtype, torch.float32)
        frequencies, factor = self.scaling.frequencies(
            self.head_dim, self.base, device=x.device, dtype=dtype
        )
        # Whole turns are removed in float64: a float32 product near position 1,000,000 is
        # wrong by 0.03 radians.
        turns = positions.double()[:, :, None, None] * (frequencies.double() * (1 / math.tau))
        return _rotated(x, turns, factor)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base:g}, scaling={self.scaling.rope_type}"


def _rotated(x: Tensor, turns: Tensor, factor: float = 1.0) -> Tensor:
    """x (B, S, N, D) times `factor`, with its pairs (i, i + D/2) rotated by `turns` (B or 1,
    S, 1, D/2) in float64."""
    precise = torch.promote_types(x.dtype, torch.float32)
    angle = (turns - turns.floor()).to(precise) * math.tau
    cos, sin = angle.cos(), angle.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    first, second = x.to(precise).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class LearnedPositions(nn.Embedding):
    """One learned vector for each position 0 .. context-1 (GPT-2, BERT), made of the context and
    the embedding width."""

    def forward(self, positions: Tensor, *, packed: bool = False) -> Tensor:
        """Look up the vectors of positions.

        Args:
            positions: (B, S) or (1, S), int32 or int64.
            packed: Whether a row contains several sequences, so that S may exceed the context.

        Returns:
            The vectors, (B or 1, S, E).

        Raises:
            UserError: S, or on the CPU a position, is past the context of the table.
        """
        context = self.num_embeddings
        # Values are checked only on the CPU outside torch.compile: elsewhere that
        # would stall the device.
        longest = 0 if packed else positions.shape[1]
        if (
            positions.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and positions.numel()
        ):
            longest = max(longest, int(positions.max()) + 1)
        check_learned(longest, context)
        return super().forward(positions)


def check_learned(length: int, context: int) -> None:
    """Raise UserError when `length` tokens exceed a learned position table of `context` rows."""
    if length > context:
        raise UserError(
            f"{length} positions for a model with {context} learned ones: expected at most "
            f"{context} tokens. Build the model with a longer context or positions=rotary."
        )


def check_rotary(head_dim: int, base: float, multiple: int = 2) -> None:
    """Raise UserError unless the base is above 1 and the head dimension a multiple of 2
    (axial positions: of 4)."""
    if head_dim % multiple:
        raise UserError(
            f"head dimension {head_dim} with rotary positions: expected a multiple of {multiple}."
        )
    above("rope_base", base, 1)


class AxialRotaryPositions(nn.Module):
    """Rotary positions of an image: the first half of a head's pairs rotates by the row,
    the second by the column.

    Pair j of an axis (0 .. D/4 - 1) rotates by coordinate * base^(-4j/D) (Heo et al. 2024, arXiv
    2403.13298), with coordinates in pixels, so that what is learned of near pixels holds in images
    of any side (curricula need this).

    Args:
        head_dim: The head dimension D, a multiple of 4.
        side: The number of pixels in a row of the image.
        base: The base of the angles, above 1.
    """

    def __init__(self, head_dim: int, side: int, base: float = AXIAL_BASE) -> None:
        super().__init__()
        self.head_dim, self.side, self.base = head_dim, side, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, S, N, D) by positions (B, S) or (1, S), pixel numbers in raster order."""
        exponent = (
            torch.arange(0, self.head_dim, 4, device=x.device, dtype=torch.float64) / self.head_dim
        )
        frequency = self.base**-exponent * (1 / math.tau)
        rows = torch.div(positions, self.side, rounding_mode="floor").double()
        columns = torch.remainder(positions, self.side).double()
        turns = torch.cat((rows[..., None] * frequency, columns[..., None] * frequency), dim=-1)
        return _rotated(x, turns[:, :, None, :])

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, side={self.side}, base={self.base:g}"
