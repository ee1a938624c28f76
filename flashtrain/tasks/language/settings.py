"""The settings of task=language_model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flashtrain.errors import UserError, at_least, between
from flashtrain.settings import options
from flashtrain.settings.data import LengthWeight
from flashtrain.settings.mask import MaskSettings
from flashtrain.settings.model import ModelSettings
from flashtrain.settings.options import of_run
from flashtrain.settings.settings import CONTEXT, divisors
from flashtrain.settings.text import TextSettings


@dataclass
class GenerateSettings:
    """How text is generated: the sample that a run prints at its end, and mode=generate."""

    max_new_tokens: int = 120  # how many tokens are written after a prompt
    temperature: float = 0.8  # divides the logits before a token is drawn; 0 takes the likeliest
    top_k: int = 50  # how many of the likeliest tokens one is drawn among
    # Of these the likeliest whose probabilities add up to this; 1: all.
    top_p: float = 1.0

    def check(self) -> None:
        at_least("generate.max_new_tokens", self.max_new_tokens, 1)
        between("generate.temperature", self.temperature, 0, 1e6)
        at_least("generate.top_k", self.top_k, 1)
        between("generate.top_p", self.top_p, 0, 1)


@dataclass
class ExportSettings:
    """What mode=export writes."""

    # dtype of the weights; null: that of the Hugging Face folder from which the training began,
    # else theirs in training
    dtype: str | None = options.option(None, options.ExportDtype)
    # Name of the hub's repository (OWNER/NAME, or NAME) that gets the export with a model card;
    # a new one is private.
    push: str | None = None


@dataclass
class LanguageStage:
    """One stage of a training; null: as in the run's settings, of the model as before."""

    context: int | None = of_run("context")
    steps: int | None = of_run("trainer.steps")
    tokens_per_step: int | None = of_run("trainer.tokens_per_step")
    micro_batch: int | None = of_run("trainer.micro_batch")
    learning_rate: float | None = of_run("optimizer.learning_rate")
    schedule: str | None = of_run("schedule.name")
    warmup_steps: int | float | None = of_run("schedule.warmup_steps")
    rope: str | None = of_run("model.rope")
    rope_factor: float | None = of_run("model.rope_factor")
    rope_base: float | None = of_run("model.rope_base")
    interpolate_positions: bool | None = of_run("model.interpolate_positions")
    length_weights: list[LengthWeight] | None = of_run("data.length_weights")


@dataclass
class LanguageSettings(TextSettings):
    """Settings of language models."""

    task: str = "language_model"
    # Devices that share a sequence; above 1: trainer.strategy=context_parallel.
    context_parallel: int | None = None
    # What mode=generate continues: a text, or a conversation; also the sample's at a run's end;
    # -: messages that are typed, a line each.
    prompt: str = ""
    # Trainings one after the other, each from the weights of the one before; empty: a single one.
    stages: list[LanguageStage] = field(default_factory=list)
    model: ModelSettings = field(default_factory=ModelSettings)
    mask: MaskSettings = field(default_factory=MaskSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    export: ExportSettings = field(default_factory=ExportSettings)

    @property
    def applied_mask(self) -> MaskSettings:
        """The group `mask`, with `documents` true if mask.documents or data.document_mask restricts
        the mask to documents."""
        within = self.mask.name == "document" or self.mask.documents or self.data.document_mask
        return replace(self.mask, documents=within)

    @property
    def mask_label(self) -> str:
        """A short name of applied_mask, such as "window 1024 within documents"."""
        label = self.applied_mask.label
        return "document" if label == "causal within documents" else label

    @property
    def strategy(self) -> str:
        """The training strategy: trainer.strategy, or "context_parallel" if that is auto and the
        setting context_parallel is above 1."""
        strategy = self.trainer.strategy
        return CONTEXT if strategy == "auto" and (self.context_parallel or 1) > 1 else strategy

    @property
    def context_degree(self) -> int:
        """The number of devices over which a sequence is sharded; 1 without context parallelism."""
        return (self.context_parallel or self.trainer.ranks) if self.strategy == CONTEXT else 1

    def check_inputs(self) -> None:
        tokenizer, data, lacking = self.data.tokenizer == "huggingface", self.data, []
        plans = self.mode == "plan" and self.trainer.epochs is None  # which reads no tokens
        if (
            tokenizer
            and self.model.path is None
            and self.weights is None
            and "data.tokenizer" not in self.demo
            and not (plans and self.model.config is not None)
        ):
            also = " (or, for a plan, model.config=NAME)" if plans else ""
            needed = f"model.path=FOLDER_OR_HUB_NAME{also}"
            if self.model.config is not None:
                needed = f"data.tokenizer=FOLDER beside model.config={self.model.config}"
            lacking.append(needed)
        if data.source == "chat" and data.path is None and data.name is None:
            lacking.append("data.path=CONVERSATIONS.jsonl (or data.name=DATASET)")
        if lacking:
            raise UserError(f"recipe={self.recipe} needs {' and '.join(lacking)}.")

    def check(self) -> None:
        super().check()
        reads = self.mode != "plan" or self.trainer.epochs is not None
        if reads and self.data.source == "chat" and self.data.tokenizer in ("bytes", "bpe", "gpt2"):
            raise UserError(
                f"data=chat with data.tokenizer={self.data.tokenizer}: conversations need a "
                "tokenizer with a chat template. Set data.tokenizer=FOLDER, a Hugging Face "
                f"tokenizer{', or leave out trainer.epochs' * (self.mode == 'plan')}."
            )
        if self.model.quantize is not None and self.shards_weights:
            raise UserError(
                f"model.quantize={self.model.quantize} needs whole weights on each device, and "
                f"trainer.strategy={self.strategy} shards them. Use trainer.strategy=ddp."
            )
        planned = None if (groups := self.trainer.context_parallel_groups) == "fixed" else groups
        used = self.model.float8 is not None and self.mode in ("train", "plan")
        odd, multiple = -(-self.context // self.context_degree) % 16, 16 * self.context_degree
        for name, given, why in (
            ("model.quantize", self.model.quantize, "its weights have 16 or 32 bits"),
            ("memory.ffn_chunk", self.memory.ffn_chunk, "chunks are computed in bf16"),
            ("context", self.context if odd else None, f"expected a multiple of {multiple}"),
            ("trainer.context_parallel_groups", planned, "devices hold any number of tokens"),
        ):
            if used and given is not None:
                raise UserError(f"model.float8={self.model.float8} with {name}={given}: {why}.")
        if self.model.name == "huggingface" and self.mask.name not in ("causal", "document"):
            raise UserError(
                f"mask={self.mask.name} is used by flashtrain's own decoders. "
                "With model=huggingface use mask=causal (the model's own) or mask=document."
            )
        at_least("context_parallel", self.context_parallel, 1)
        # Others may name it: their settings are those of a trained checkpoint.
        if self.mode in ("train", "plan"):
            self.check_context()

    def check_context(self) -> None:
        """Raise UserError if the settings request context parallelism that cannot work."""
        degree, named = self.context_parallel, self.trainer.strategy
        if self.strategy != CONTEXT:
            if degree is not None and degree > 1:
                raise UserError(
                    f"context_parallel={degree} shards sequences over devices, and "
                    f"trainer.strategy={named} does not. Use trainer.strategy=context_parallel, "
                    "or context_parallel=1."
                )
            used = (("method", "auto"), ("layout", "balanced"), ("groups", "fixed"))
            names = [(f"context_parallel_{name}", default) for name, default in used]
            found = [(name, getattr(self.trainer, name)) for name, _ in names]
            changed = [f"{name}={value}" for name, value in found if (name, value) not in names]
            if degree is None and changed:
                given = changed[0]
                raise UserError(
                    f"trainer.{given} needs context parallelism, which is off. "
                    f"Set context_parallel=2, or remove trainer.{given}."
                )
            return
        planned = self.trainer.context_parallel_groups == "planned"
        if planned and not self.applied_mask.documents:
            raise UserError(
                "trainer.context_parallel_groups=planned shares documents among devices, and here "
                "the tokens of a row see across them. Set data.document_mask=true."
            )
        degree, ranks = self.context_degree, self.trainer.ranks
        if ranks % degree:
            raise UserError(
                f"context_parallel={degree} does not divide {ranks} device(s), trainer.devices x "
                f"trainer.nodes. Use context_parallel={', '.join(map(str, divisors(ranks)))}, or "
                f"trainer.devices={degree}."
            )
        if self.attention.name != "flash":
            raise UserError(
                f"attention={self.attention.name} computes whole sequences on one device, "
                "and context parallelism shards them. Use attention=flash."
            )
        if self.trainer.cuda_graphs:
            raise UserError(
                "trainer.cuda_graphs=true cannot record the communication of context parallelism. "
                "Use trainer.cuda_graphs=false."
            )
