"""The words of the benchmarks' settings: masks, implementations, presets, models. Needs nothing but Python."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashtrain.errors import UserError, unknown

PRESETS = ("grid", "anchors", "paper", "features", "block-sparse")
DIRECTIONS = ("forward", "backward")
DTYPES = ("bfloat16", "float16", "float32")

# In the order of the tables.
IMPLEMENTATIONS = (
    "flashtrain", "flashtrain-packed", "flashtrain-planned", "flashtrain-portable", "sdpa-flash", "sdpa-cudnn",
    "sdpa-efficient", "sdpa-math", "standard", "flex", "varlen-attn", "flash-attn", "flash-attn-4",
)  # fmt: skip

# Of whole training steps (benchmark.name=step), in the order of the tables.
STEP_IMPLEMENTATIONS = (
    "flashtrain", "flashtrain-float32-residual", "flashtrain-sdpa", "flashtrain-standard", "pytorch", "pytorch-cudnn",
    "standard", "hf-eager", "hf-sdpa", "hf-sdpa-compile",
)  # fmt: skip
# Of the Long Range Arena's training steps (benchmark.name=sequence).
SEQUENCE_IMPLEMENTATIONS = (
    "flash", "block-sparse", "sdpa", "standard", "flash-eager", "block-sparse-eager", "sdpa-eager", "standard-eager",
)  # fmt: skip
SEQUENCE_TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx", "path256")  # the last when named
# Of BERT's training steps (benchmark.name=bert); -buckets: sequences of like length together.
BERT_IMPLEMENTATIONS = (
    "flashtrain", "flashtrain-padded", "hf-eager", "hf-sdpa", "hf-sdpa-compile",
    "hf-eager-buckets", "hf-sdpa-buckets", "hf-sdpa-compile-buckets",
)  # fmt: skip
BERT_MODELS = ("tiny", "base", "large")
BERT_UNITS = ("sentence", "paragraph", "document")
# Of one sequence over several devices (benchmark.name=context): the ways and layouts of flashtrain/distributed/context.
CONTEXT_WAYS = ("all-to-all", "all-gather", "ring", "hybrid")
CONTEXT_LAYOUTS = ("balanced", "head-tail", "contiguous")
CONTEXT_IMPLEMENTATIONS = (
    "flashtrain", "plain-all-gather", "torch-flash", "torch-cudnn", "ring-flash-attention",
)  # fmt: skip
STEP_MODELS = ("demo", "124m", "355m", "774m", "1.3b", "1.5b")
WEIGHTS = ("fp32", "bf16", "bf16-master")

# What a mask's name says. The documents of one row have the lengths of Case.documents.
MASKS = {
    "full": "every key",
    "causal": "the keys up to the query's own position, aligned bottom-right",
    "window-L": "causal, the last L + 1 keys (flash-attn's window (L, 0)), as in window-1024",
    "window-L-R": "the keys from L before to R after, as in window-512-512",
    "document": "the keys of the query's own document",
    "causal-document": "the same, causal",
    "varlen": "as document, by the functions that take cu_seqlens",
    "causal-varlen": "as causal-document, by the functions that take cu_seqlens",
    "prefix-lm": "the first quarter, and what comes before the query",
    "prefix-lm-document": "the same within each document",
    "shared-question": "a question (a quarter) and six answers: the question, and the query's own answer, causal",
    "global-window": "the first 1/128 of the tokens see and are seen by all; the others a window of 1/16 to each side",
    "causal-blockwise": "segments see themselves, the last one everything, causal",
    "block-causal-document": "the own and the earlier blocks of 256 tokens of the query's document",
    "block-random": "a share (benchmark.densities) of the 128 x 128 blocks, the diagonal ones among them",
    "block-butterfly": "the blocks (i, j) whose numbers differ in at most one binary digit",
}
WITH_DOCUMENTS = (
    "document", "causal-document", "varlen", "causal-varlen", "prefix-lm-document", "causal-blockwise",
    "block-causal-document",
)  # fmt: skip
BLOCK_SPARSE = ("block-random", "block-butterfly")
# Masks that are no function of a sequence in its order: tables of blocks, and packed rows' own functions.
NOT_OVER_DEVICES = ("varlen", "causal-varlen", *BLOCK_SPARSE)


@dataclass(frozen=True)
class MaskName:
    """A mask's name taken apart. kind: its entry in MASKS, "window" for the two windows.

    left, right: keys to each side of the query that a window or causal mask shows, as flash-attn counts them; -1: all.
    """

    kind: str
    left: int = -1
    right: int = -1

    @property
    def causal(self) -> bool:
        return self.right == 0


def parse_mask(name: str) -> MaskName:
    """What a mask's name means. Raises UserError for a name that is none of MASKS."""
    window = re.fullmatch(r"window-(\d+)(?:-(\d+))?", name)
    if window:
        return MaskName("window", int(window[1]), int(window[2] or 0))
    if name not in MASKS or name.startswith("window"):
        raise unknown("mask", name, MASKS)
    return MaskName(name, -1, 0 if name.startswith("causal") else -1)


def check_names(setting: str, given: list[str] | None, possible: tuple[str, ...]) -> None:
    """Raise UserError for an empty list, or for the first name in it that is not possible."""
    if given is None:
        return
    if not given:
        raise UserError(f"{setting}=[] names nothing. Possible: {', '.join(possible)}.")
    for name in given:
        if name not in possible:
            raise unknown(setting, name, possible)
