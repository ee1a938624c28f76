"""The LightningDataModule of masked-language training.

T tokens of a packed row.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader

from flashtrain.data.balance import BY_TOKENS, Cost
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.loader import ResumableLoader
from flashtrain.data.masked_samples import MaskedSamples
from flashtrain.data.masking import MaskedBatch
from flashtrain.data.packing import Spans
from flashtrain.data.pieces import TokenBreaks, split_pieces
from flashtrain.data.sources import TextSource, TokenSource
from flashtrain.data.token_budget import rows_once
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, without_begin
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError

SHORTEST = 16  # tokens; a shorter sentence, paragraph or document is joined to the next one
VALIDATION_SEED = 2**32  # no training run has this seed: theirs are smaller


class MaskedTextDataModule(TextDataModule):
    """The LightningDataModule of masked-language training; its batches are
    flashtrain.data.masking.MaskedBatch.

    Args:
        source: As in TextDataModule, but not a TokenSource.
        tokenizer: As in TextDataModule. Four special tokens are added to its own
            (see SpecialTokens.past).
        context: Tokens of the longest sample, with [CLS] and [SEP].
        token_budget: T, tokens of a micro-batch on each device, at least `context`.
        unit: What a sample is: "sentence", "paragraph" or "document", cut if it is
            longer than the context.
        share: Share (0 to 1) of the tokens that is masked.
        layout: "packed", or "padded": the same samples in padded rows.
        cost: Cost of a sequence, by which the rows of a step are balanced (BertConfig's
            cost_per_token, cost_per_pair).
        validation_samples: Maximum number of held-out samples to validate on,
            masked the same every time.
        **options: total_steps, accumulate, seed, num_workers, validation, validation_fraction and
            cache_dir: see TextDataModule.

    Raises:
        UserError: Arguments out of range, and as in TextDataModule.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | TextSource = "stdlib",
        tokenizer: str | TokenizerSpec | Tokenizer = "bytes",
        context: int = 512,
        token_budget: int = 8192,
        *,
        unit: str = "paragraph",
        share: float = 0.15,
        layout: str = "packed",
        cost: Cost = BY_TOKENS,
        validation_samples: int = 10000,
        **options: Any,
    ) -> None:
        if context < 3:
            raise UserError(f"context={context} must be at least 3: [CLS], one token and [SEP].")
        self.token_budget = token_budget
        self.unit = unit
        self.share = share
        self.layout = layout
        self.cost = cost
        # A micro-batch is one row.
        super().__init__(
            source, tokenizer, context, 1, validation_samples=validation_samples, **options
        )
        # A sample has [CLS] already.
        if isinstance(self.tokenizer_spec, TokenizerSpec):
            self.tokenizer_spec = replace(self.tokenizer_spec, begin_of_text=False)
        else:
            self.tokenizer_spec = without_begin(self.tokenizer_spec)
        if isinstance(self.source, TokenSource):
            raise UserError(
                f"masked training needs a source of text, not {self.source.describe()}. "
                "Use data=files."
            )

    @property
    def special(self) -> SpecialTokens:
        """The four special tokens, whose ids follow the tokenizer's own. Needs setup()."""
        return SpecialTokens.past(self.tokenizer.vocab_size)

    @property
    def vocab_size(self) -> int:
        """The number of the tokenizer's tokens and the special tokens together. Needs setup()."""
        return self.special.vocab_size

    def padding(self) -> float:
        """Estimate how many tokens a micro-batch computes, padding included, for each token of its
        budget. Needs setup().

        Returns:
            1 for packed rows; for padded rows about the length of the longest sample in the first
            epoch divided by the mean length.
        """
        if self.layout != "padded":
            return 1.0
        lengths = self._masked(self.split.training, self.seed).lengths
        return float(lengths.max() / lengths.mean())

    def means(self) -> tuple[float, float]:
        """Return query-key pairs and labels, both per training token of the first epoch. Needs
        setup()."""
        samples = self._masked(self.split.training, self.seed)
        lengths, tokens = samples.lengths, float(samples.lengths.sum())
        return float((lengths * lengths).sum()) / tokens, float(samples.label_counts.sum()) / tokens

    def train_dataloader(self) -> ResumableLoader:
        """Return the run's micro-batches for this device, from the trainer's current step on."""
        self._check()
        samples = self._masked(self.split.training, self.seed)
        limits = {"budget": self.token_budget, "max_sequences": samples.max_sequences}
        return self._training(samples, {**limits, "cost": self.cost})

    def val_dataloader(self) -> DataLoader[MaskedBatch] | list[DataLoader[MaskedBatch]]:  # type: ignore[override]
        """Return the loader of this device's rows of validation samples; an empty list if none are
        held out."""
        self._check()
        held_out = self.split.validation
        if held_out is None:
            return []
        samples = self._masked(held_out, VALIDATION_SEED)
        world_size, rank = self._place()
        lengths = samples.lengths[: self.validation_samples]
        planned = rows_once(
            lengths, budget=self.token_budget, ranks=world_size, max_sequences=samples.max_sequences
        )
        return self._evaluation(samples, [samples.row(of_ranks[rank]) for of_ranks in planned])

    @property
    def held_out_samples(self) -> int:
        """The number of samples of each validation, over all devices. Needs setup()."""
        held_out = self.split.validation
        if held_out is None:
            return 0
        return min(self.validation_samples, len(self._masked(held_out, VALIDATION_SEED)))

    def scored(self) -> dict[str, int]:
        """Count the samples that a validation reads. Needs setup()."""
        return {"samples": self.held_out_samples}

    @cached_property
    def _breaks(self) -> TokenBreaks:
        return TokenBreaks.of(self.tokenizer)

    def pieces(self, spans: Spans) -> Spans:
        """Cut the documents of a split into the texts of samples, as `unit`
        and `context` require."""
        longest = self.context - 2
        return split_pieces(
            self.cache.tokens,
            spans,
            self._breaks,
            unit=self.unit,
            longest=longest,
            shortest=min(SHORTEST, longest),
            end_of_text=self.tokenizer.end_of_text,
        )

    def _masked(self, spans: Spans, seed: int) -> MaskedSamples:
        return MaskedSamples(
            self.cache.tokens,
            self.pieces(spans),
            self.special,
            budget=self.token_budget,
            seed=seed,
            share=self.share,
            layout=self.layout,
        )
