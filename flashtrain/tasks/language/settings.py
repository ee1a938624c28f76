"""The settings of task=language_model: what is trained, on what text, what a token sees, and what is written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flashtrain.errors import UserError, at_least
from flashtrain.settings.groups import GenerateSettings, MaskSettings, ModelSettings
from flashtrain.settings.settings import CONTEXT
from flashtrain.settings.text import TextSettings


@dataclass
class LanguageSettings(TextSettings):
    """Settings of language models.

    context_parallel: devices that share each sequence; above 1 it asks for trainer.strategy=context.
    """

    task: str = "language_model"
    context_parallel: int | None = None
    prompt: str = ""  # for mode=generate, and the sample at a run's end
    model: ModelSettings = field(default_factory=ModelSettings)
    mask: MaskSettings = field(default_factory=MaskSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)

    @property
    def within_documents(self) -> bool:
        """Whether a token sees nothing of other documents of its row."""
        return self.mask.name == "document" or self.mask.documents or self.data.document_mask

    @property
    def mask_label(self) -> str:
        """The mask in words, however it was asked for to stay within documents."""
        label = replace(self.mask, documents=self.within_documents).label
        return "document" if label == "causal within documents" else label

    @property
    def strategy(self) -> str:
        """trainer.strategy, or "context" where that is auto and context_parallel is above 1."""
        strategy = self.trainer.strategy
        return CONTEXT if strategy == "auto" and (self.context_parallel or 1) > 1 else strategy

    @property
    def asked_to_share(self) -> str:
        """How context parallelism was asked for, as a setting."""
        if self.trainer.strategy == CONTEXT:
            return f"trainer.strategy={CONTEXT}"
        return f"context_parallel={self.context_parallel}"

    @property
    def context_degree(self) -> int:
        """Devices that share a sequence; 1 where each has its own."""
        return (self.context_parallel or self.trainer.ranks) if self.strategy == CONTEXT else 1

    def check(self) -> None:
        super().check()
        if self.model.quantize is not None and self.shards_weights:
            raise UserError(
                f"model.quantize={self.model.quantize} keeps whole weights on each device: choose trainer.strategy=ddp."
            )
        if self.model.name == "huggingface" and self.mask.name not in ("causal", "document"):
            raise UserError(
                f"mask={self.mask.name} is of flashtrain's own decoders; model=huggingface has masks of its own, and "
                "mask=document."
            )
        at_least("context_parallel", self.context_parallel, 1)
        if self.mode in ("train", "plan"):  # others may name it: their settings are those of a trained checkpoint
            self.check_context()

    def check_context(self) -> None:
        """Raise UserError where a training asks for context parallelism and cannot have it."""
        degree, named = self.context_parallel, self.trainer.strategy
        if self.strategy != CONTEXT:
            if degree is not None and degree > 1:
                raise UserError(
                    f"context_parallel={degree} shares a sequence among devices, and trainer.strategy={named} gives "
                    "each its own: choose trainer.strategy=context, or context_parallel=1."
                )
            way, layout = self.trainer.context_way, self.trainer.context_layout
            if degree is None and (way != "auto" or layout != "balanced"):
                given = f"context_way={way}" if way != "auto" else f"context_layout={layout}"
                raise UserError(
                    f"trainer.{given} says how devices share a sequence, and each has its own: add context_parallel=2 "
                    "(or more), or leave it out."
                )
            return
        self._check_degree()
        if self.attention.name != "flash":
            raise UserError(
                f"attention={self.attention.name} computes whole sequences on one device, and "
                f"{self.asked_to_share} computes flash attention over all: choose attention=flash."
            )
        if self.trainer.cuda_graphs:
            raise UserError(
                f"trainer.cuda_graphs=true cannot record what devices send each other under {self.asked_to_share}: "
                "choose trainer.cuda_graphs=false."
            )

    def _check_degree(self) -> None:
        degree, ranks = self.context_degree, self.trainer.ranks
        if ranks % degree == 0:
            return
        fitting = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
        devices = f"{ranks} device{'' if ranks == 1 else 's'} (trainer.devices x trainer.nodes)"
        raise UserError(
            f"context_parallel={degree} does not divide {devices}: choose context_parallel={fitting}, or "
            f"trainer.devices={degree}."
        )
