"""The settings `benchmark.*` and their words: which shapes or models, which implementations, masks, for how long."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from flashtrain.errors import UserError, at_least, between, one_of, unknown
from flashtrain.registry import registered

PRESETS = ("grid", "anchors", "paper", "features", "block-sparse", "as-called")
DTYPES = ("bfloat16", "float16", "float32")

# In the order of the tables.
IMPLEMENTATIONS = (
    "flashtrain", "flashtrain-planned", "flashtrain-compiled", "flashtrain-portable", "sdpa-flash",
    "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "standard", "flex", "varlen-attn", "flash-attn", "flash-attn-3",
    "flash-attn-4",
)  # fmt: skip
# Of rows=as-called, where none is named: what a program would call instead.
AS_CALLED = (
    "flashtrain", "flashtrain-planned", "flashtrain-compiled", "sdpa-flash", "sdpa-cudnn", "varlen-attn", "flash-attn",
    "flash-attn-3", "flash-attn-4",
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
# Of transformers' decoders (benchmark.name=huggingface); a name ends in LORA where adapters alone are trained.
HF_IMPLEMENTATIONS = ("flashtrain", "hf-flashtrain", "hf-sdpa", "hf-sdpa-compile", "hf-sdpa-compile-layers")
LORA = "-lora"
HF_MODELS = tuple(name + end for name in ("tiny", "llama-1b", "llama-3b", "llama-8b", "qwen3-8b") for end in ("", LORA))
HUGGINGFACE = ("huggingface", "huggingface-long")
BERT_UNITS = ("sentence", "paragraph", "document")
# Of one sequence over several devices (benchmark.name=context): the ways and layouts of flashtrain/distributed/context.
CONTEXT_WAYS = ("all-to-all", "all-gather", "ring", "hybrid")
CONTEXT_LAYOUTS = ("balanced", "head-tail", "contiguous")
CONTEXT_IMPLEMENTATIONS = ("flashtrain", "plain-all-gather", "torch-flash", "torch-cudnn")
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
    "shared-question": "a question (a quarter) and six answers: the question, and the query's own answer, causal",
    "global-window": "the first 1/128 of the tokens see and are seen by all; the others a window of 1/16 to each side",
    "block-random": "a share (benchmark.densities) of the 128 x 128 blocks, the diagonal ones among them",
    "block-butterfly": "the blocks (i, j) whose numbers differ in at most one binary digit",
}
WITH_DOCUMENTS = ("document", "causal-document", "varlen", "causal-varlen")
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


class Shape(NamedTuple):
    """Heads of one layer: query heads, key/value heads, head dimension."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f"/{self.kv_heads}"
        return f"{self.heads}{shared}x{self.head_dim}"


@dataclass
class ContextSettings:
    """shapes: as "16x128" (heads x head dimension) or "32/8x128" (32 query, 8 key/value heads); None: 16x128.
    ways, layouts: of flashtrain's attention, None: all. degrees: devices that share a sequence.
    one_device_longest: up to this length the same attention is measured on one device too, beyond it that time follows
    from the FLOP rate at the longest length measured, and is marked. check_longest: up to this length results and
    gradients are compared with float64.
    """

    shapes: list[str] | None = None
    ways: list[str] | None = None
    layouts: list[str] | None = None
    degrees: list[int] | None = None
    one_device_longest: int = 131072
    check_longest: int = 32768

    def check_context(self) -> None:
        """Raise UserError for the first of these settings that cannot be."""
        check_names("benchmark.ways", self.ways, CONTEXT_WAYS)
        check_names("benchmark.layouts", self.layouts, CONTEXT_LAYOUTS)
        for text in self.shapes or []:
            parse_shape(text)
        if self.degrees is not None and not self.degrees:
            raise UserError("benchmark.degrees=[] names nothing. Possible: numbers of 2 or more.")
        for degree in self.degrees or []:
            at_least("benchmark.degrees", degree, 2)
        for setting in ("one_device_longest", "check_longest"):
            at_least(f"benchmark.{setting}", getattr(self, setting), 0)


def parse_shape(text: str) -> Shape:
    """What an entry of benchmark.shapes means. Raises UserError for one that cannot be."""
    found = re.fullmatch(r"(\d+)(?:/(\d+))?x(\d+)", text)
    if found is None:
        raise UserError(f"benchmark.shapes: '{text}' is no shape. Possible: 16x128, or 32/8x128 with shared heads.")
    heads, head_dim = int(found[1]), int(found[3])
    kv_heads = int(found[2] or heads)
    if not (1 <= kv_heads <= heads and heads % kv_heads == 0 and 1 <= head_dim <= 256):
        raise UserError(
            f"benchmark.shapes: '{text}' cannot be. Possible: key/value heads that divide the query heads, and head "
            "dimensions of 1 to 256."
        )
    return Shape(heads, kv_heads, head_dim)


def check_masks(names: list[str] | None) -> None:
    """Raise UserError for the first mask that is not computed over several devices."""
    for name in names or []:
        if parse_mask(name).kind in NOT_OVER_DEVICES:
            possible = ", ".join(mask for mask in MASKS if mask not in NOT_OVER_DEVICES)
            raise UserError(f"benchmark.masks: {name} over several devices. Possible: {possible}.")


@dataclass
class StepSettings:
    """What recipe=gpt2-speed and recipe=context-speed measure: whole training steps (name step).

    models, contexts, weights: every combination is measured. weights: "fp32" computes in autocast's bfloat16, "bf16"
    holds weights and optimiser states in bfloat16, "bf16-master" has float32 copies of them beside. batches: sequences
    a step, each implementation is told at its best one; None: as many as hold `tokens` together. steps: of one turn of
    an implementation. compile: whether implementations that are compiled may be; None: on GPUs only. command_steps:
    steps for which `python -m flashtrain recipe=gpt2` is run beside the bare loop, 20 or more, to tell what its data
    and logging cost; 0: not. updates: of recipe=hf-speed; false measures forward and backward alone.
    """

    models: list[str] = field(default_factory=lambda: ["124m", "355m"])
    contexts: list[int] = field(default_factory=lambda: [1024])
    batches: list[int] | None = None
    weights: list[str] = field(default_factory=lambda: ["fp32"])
    steps: int = 10
    compile: bool | None = None
    command_steps: int = 0
    updates: bool = True

    def check_steps(self, models: tuple[str, ...] = STEP_MODELS, *, needs_contexts: bool = True) -> None:
        """Raise UserError for the first of these settings that cannot be. models: those that can be measured."""
        check_names("benchmark.models", self.models, models)
        check_names("benchmark.weights", self.weights, WEIGHTS)
        for setting, given in (("contexts", self.contexts), ("batches", self.batches)):
            if given is not None and not given and (needs_contexts or setting != "contexts"):
                raise UserError(f"benchmark.{setting}=[] names nothing. Possible: numbers of 1 or more.")
            for number in given or []:
                at_least(f"benchmark.{setting}", number, 1)
        at_least("benchmark.steps", self.steps, 1)
        if self.command_steps:  # it logs every tenth, and the first time is left out
            at_least("benchmark.command_steps", self.command_steps, 20)


@dataclass
class BenchmarkSettings(StepSettings, ContextSettings):
    """What a recipe measures; recipes that train measure nothing (name None). Here, recipe=attention-benchmark's.

    tasks: of recipe=lra-speed (None: all). rows: a preset of cases.py. seqlens, head_dims and masks: the lengths,
    head dimensions and masks of rows=grid (None: its own); with another preset they choose among its rows. batch:
    sequences, or None: as many as hold `tokens` together. heads None: 2048 / head dimension. densities: of
    rows=block-sparse. longest: leaves longer rows out (recipe=lra-speed: cuts sequences to it).
    units, samples: of recipe=bert-speed: besides full rows of `contexts`, so many sequences of the lengths that these
    units of the text have; dropouts: each measured.
    implementations None: all that this device can have. rounds: how often every implementation takes its turn.
    warm_seconds: of rows=as-called on a GPU: before measuring, processes beside each other call everything once, for so
    long at most, so that compiled kernels are found on disk.
    max_seconds: begin nothing new after this long, so that a rented GPU is given back in time.
    """

    name: str | None = None
    tasks: list[str] | None = None
    rows: str = "grid"
    seqlens: list[int] | None = None
    batch: int | None = None
    tokens: int = 16384  # of a batch, where benchmark.batch or .batches does not say
    heads: int | None = None
    kv_heads: int | None = None  # key/value heads; null: as many as heads
    head_dims: list[int] | None = None
    masks: list[str] | None = None
    densities: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.25, 0.5, 1.0])
    dtype: str = "bfloat16"
    implementations: list[str] | None = None
    longest: int | None = None
    units: list[str] = field(default_factory=lambda: ["paragraph"])
    samples: int = 2048
    dropouts: list[float] = field(default_factory=lambda: [0.0])
    rounds: int = 10
    max_seconds: float | None = None
    warm_seconds: float = 60.0
    reference: bool = True  # also compute a float64 reference, and each implementation's error

    def check(self) -> None:
        if self.name is not None:
            one_of("benchmark.name", self.name, registered("benchmark"))
        one_of("benchmark.rows", self.rows, PRESETS)
        one_of("benchmark.dtype", self.dtype, DTYPES)
        possible = {
            "step": STEP_IMPLEMENTATIONS,
            "sequence": SEQUENCE_IMPLEMENTATIONS,
            "bert": BERT_IMPLEMENTATIONS,
            "context": CONTEXT_IMPLEMENTATIONS,
            "huggingface": HF_IMPLEMENTATIONS,
        }.get(str(self.name), IMPLEMENTATIONS)
        check_names("benchmark.tasks", self.tasks, SEQUENCE_TASKS)
        check_names("benchmark.implementations", self.implementations, possible)
        self.check_context()
        if self.name == "context":
            check_masks(self.masks)
        real_lengths = self.name == "bert" and bool(self.units)
        models = BERT_MODELS if self.name == "bert" else HF_MODELS if self.name in HUGGINGFACE else STEP_MODELS
        self.check_steps(models, needs_contexts=not real_lengths)
        for unit in self.units:
            one_of("benchmark.units", unit, BERT_UNITS)
        for dropout in self.dropouts:
            between("benchmark.dropouts", dropout, 0.0, 1.0, include_high=False)
        if not self.dropouts:
            raise UserError("benchmark.dropouts=[] names nothing. Possible: probabilities, 0 for none.")
        at_least("benchmark.samples", self.samples, 1)
        for mask in self.masks or []:
            parse_mask(mask)
        for length in self.seqlens or []:
            at_least("benchmark.seqlens", length, 1)
        for head_dim in self.head_dims or []:
            between("benchmark.head_dims", head_dim, 1, 256)
        for density in self.densities:
            if not 0.0 < density <= 1.0:
                raise UserError(f"benchmark.densities={list(self.densities)} must be numbers in (0, 1].")
        for setting in ("batch", "heads", "kv_heads", "longest", "max_seconds"):
            given = getattr(self, setting)
            if given is not None:
                at_least(f"benchmark.{setting}", given, 1)
        at_least("benchmark.tokens", self.tokens, 1)
        at_least("benchmark.warm_seconds", self.warm_seconds, 0)
        at_least("benchmark.rounds", self.rounds, 1)
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise UserError(
                f"benchmark.kv_heads={self.kv_heads} must divide benchmark.heads={self.heads}: "
                "a group of query heads shares each key/value head."
            )
