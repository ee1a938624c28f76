"""The settings of recipe=attention-benchmark, and the names of its masks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from flashtrain.errors import between, unknown
from flashtrain.settings.options import option

PRESETS = ("grid", "core", "paper", "features", "block-sparse", "as-called", "wide")
DTYPES = ("bfloat16", "float16", "float32")

# What a mask's name says. The documents of one row have the lengths of Case.documents.
MASKS = {
    "full": "every key",
    "causal": "the keys up to the query's own position, aligned bottom-right",
    "window-L": "causal, the last L + 1 keys (flash-attn's window (L, 0)), as in window-1024",
    "window-L-R": "the keys from L before to R after, as in window-512-512",
    "document": "the keys of the query's own document",
    "causal-document": "the same, causal",
    "causal-document-zigzag": "the same, of tokens in the order of four ranks' zigzag shards",
    "varlen": "as document, by the functions that take cu_seqlens",
    "causal-varlen": "as causal-document, by the functions that take cu_seqlens",
    "prefix-lm": "the first quarter, and what comes before the query",
    "shared-question": (
        "a question (a quarter) and six answers: the question, and the query's own answer, causal"
    ),
    "global-window": (
        "the first 1/128 of the tokens see and are seen by all; "
        "the others a window of 1/16 to each side"
    ),
    "block-random": (
        "a share (benchmark.densities) of the 128 x 128 blocks, the diagonal ones among them"
    ),
    "block-butterfly": "the blocks (i, j) whose numbers differ in at most one binary digit",
    "block-sliding": "3 x 3 x 3 tiles of 2 x 8 x 8 around the query's, in frames of 32 x 40",
    "tile-F-R": "of a video of F frames the query's own and R reference frames, which see all",
}
PACKED = ("document", "causal-document", "varlen", "causal-varlen")
WITH_DOCUMENTS = (*PACKED, "causal-document-zigzag")
BLOCK_SPARSE = ("block-random", "block-butterfly", "block-sliding")


@dataclass(frozen=True)
class MaskName:
    """A benchmark's mask name in parts: the kind of mask, and how many keys before and
    after a query it shows."""

    kind: str  # its entry in MASKS, "window" for the two windows
    left: int = -1  # keys before the query that are visible, as flash-attn counts them; -1: all
    right: int = -1  # keys after the query that are visible; -1: all
    frames: int = 0  # of a video
    references: int = 0  # of these frames

    @property
    def causal(self) -> bool:
        return self.right == 0


def parse_mask(name: str) -> MaskName:
    """Return the parts of a mask's name. Raises UserError for a name that is not in MASKS."""
    window = re.fullmatch(r"window-(\d+)(?:-(\d+))?", name)
    if window:
        return MaskName("window", int(window[1]), int(window[2] or 0))
    tile = re.fullmatch(r"tile-(\d+)-(\d+)", name)
    if tile and int(tile[1]):
        return MaskName("tile", frames=int(tile[1]), references=int(tile[2]))
    if name not in MASKS or name.startswith(("window", "tile")):
        raise unknown("mask", name, MASKS)
    return MaskName(name, -1, 0 if name.startswith("causal") else -1)


@dataclass
class AttentionSettings:
    """Which attention is measured: masks, shapes and lengths."""

    rows: str = option("grid", PRESETS)  # the list of cases to measure
    # Lengths of rows=grid (null: 128 to 65536); other presets keep only these.
    seqlens: list[int] | None = None
    # Sequences of a batch; null: as many as hold benchmark.tokens together.
    batch: int | None = None
    tokens: int = 16384  # tokens of a batch, unless benchmark.batch or benchmark.batches is set
    heads: int | None = None  # query heads; null: 2048 over the head dimension
    # Head dimensions of rows=grid (null: 64, 128); others keep only these.
    head_dims: list[int] | None = None
    # masks of rows=grid (null: full and causal); others keep only these.
    masks: list[str] | None = None
    # The shares of blocks that random block-sparse masks compute.
    densities: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.25, 0.5, 1.0])
    dtype: str = option("bfloat16", DTYPES)  # the dtype of queries, keys and values
    # The most tokens of a sequence: longer rows are left out; recipe=lra-speed cuts to it.
    longest: int | None = None
    # The most seconds spent on compiling kernels first (rows=as-called on a GPU).
    warm_seconds: float = 60.0
    # Also compute a float64 reference, and each implementation's error against it.
    reference: bool = True

    def check_attention(self) -> None:
        """Raise UserError for the first invalid setting among those of this class."""
        # It imports torch, which a refused command does without.
        from flashtrain_kernels.arguments import MAX_HEAD_DIM

        for mask in self.masks or []:
            parse_mask(mask)
        for head_dim in self.head_dims or []:
            between("benchmark.head_dims", head_dim, 1, MAX_HEAD_DIM)
        for density in self.densities:
            between("benchmark.densities", density, 0.0, 1.0, include_low=False)
