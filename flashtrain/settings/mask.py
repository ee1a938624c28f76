"""The group `mask` of language models: which tokens a token sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from flashtrain.errors import UserError, at_least
from flashtrain.settings.options import Mask
from flashtrain.settings.training import no_options


@dataclass
class MaskSettings:
    """The tokens that each token sees (conf/mask). docs/extend/add-a-mask.md
    describes the masks."""

    # What a token sees: causal, document, window, chunked, prefix, or a registered mask.
    name: str = "causal"
    # Tokens of a packed row see their own document alone, and positions begin anew in each.
    documents: bool = False
    window: int | None = None  # how many tokens a token sees with mask=window, itself included
    # Tokens of a chunk with mask=chunked, counted from the first of the row or document.
    chunk: int | None = None
    # Tokens of the prefix of each row or document with mask=prefix; they are not scored.
    prefix: int | None = None
    # options of a registered mask: +mask.options.NAME=VALUE.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name of the mask, such as "window 1024 within documents"."""
        own = {"window": self.window, "chunked": self.chunk, "prefix": self.prefix}.get(self.name)
        words = [self.name, *([] if own is None else [str(own)])]
        return " ".join(
            [*words, *(["within documents"] if self.documents and self.name != "document" else [])]
        )

    def check(self) -> None:
        for name, setting, what in (
            ("window", "window", "tokens that each token sees, itself included"),
            ("chunked", "chunk", "tokens of each chunk"),
            ("prefix", "prefix", "tokens of each prefix"),
        ):
            value = getattr(self, setting)
            if self.name == name and value is None:
                raise UserError(f"mask={name} needs mask.{setting}=..., the {what}.")
            if self.name != name and value is not None:
                raise UserError(
                    f"mask.{setting}={value} is used by mask={name}, not by mask={self.name}. "
                    f"Remove mask.{setting}."
                )
            at_least(f"mask.{setting}", value, 1)
        no_options("mask", self.name, self.options, get_args(Mask))
