"""The LightningDataModule of masked-language training.

T tokens of a packed row.
"""

from __future__ import annotations

import os
from dataclasses import replace

from torch.utils.data import DataLoader

from flashtrain.data.balance import Cost
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.loader import ListedBatches, ResumableLoader, evaluation_loader
from flashtrain.data.masked_samples import MaskedSamples
from flashtrain.data.masking import MaskedBatch
from flashtrain.data.packing import Spans
from flashtrain.data.pieces import TokenBreaks, split_pieces
from flashtrain.data.sources import TextSource, TokenSource
from flashtrain.data.token_budget import rows_once
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, without_begin
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError

VALIDATION_SEED = 2**32  # no training run has this seed: theirs are smaller


class MaskedTextDataModule(TextDataModule):
    """Batches of masked samples (flashtrain.data.masking.MaskedBatch) of a corpus.

    The arguments that are not listed are those of TextDataModule; the source must be text. After setup(), `special` and
    `vocab_size` count the tokenizer's tokens and four special ones.

    Args:
        context: Tokens of the longest sample, with [CLS] and [SEP].
        token_budget: T, tokens of a micro-batch on each device.
        unit: What a sample is: "sentence", "paragraph" or "document", cut if it is longer than the context.
        shortest: Pieces with fewer tokens are joined to the next.
        share: Share of the tokens that is masked.
        layout: "packed", or "padded": the same samples in padded rows.
        cost: Cost of a sequence, by which the rows of a step are balanced (BertConfig's cost_per_token, cost_per_pair).
        validation_samples: Maximum number of held-out samples to validate on, masked the same every time.

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
        shortest: int = 16,
        share: float = 0.15,
        layout: str = "packed",
        cost: Cost | None = None,
        total_steps: int = 100,
        accumulate: int = 1,
        seed: int = 0,
        validation: TextSource | None = None,
        validation_fraction: float = 0.01,
        validation_samples: int = 10000,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if context < 3:
            raise UserError(f"context={context} must be at least 3: [CLS], one token and [SEP].")
        if token_budget < context:
            raise UserError(f"token_budget={token_budget} must be at least context={context}.")
        self.token_budget = token_budget
        self.unit = unit
        self.shortest = shortest
        self.share = share
        self.layout = layout
        self.cost = cost
        self._breaks: TokenBreaks | None = None
        super().__init__(
            source,
            tokenizer,
            context,
            1,  # a micro-batch is one row
            total_steps=total_steps,
            accumulate=accumulate,
            seed=seed,
            validation=validation,
            validation_fraction=validation_fraction,
            validation_samples=validation_samples,
            num_workers=num_workers,
            cache_dir=cache_dir,
        )
        # A sample has [CLS] already.
        if isinstance(self.tokenizer_spec, TokenizerSpec):
            self.tokenizer_spec = replace(self.tokenizer_spec, begin_of_text=False)
        else:
            self.tokenizer_spec = without_begin(self.tokenizer_spec)
        if isinstance(self.source, TokenSource):
            raise UserError(f"masked samples need a source of text, and this one is {self.source.describe()}.")

    @property
    def special(self) -> SpecialTokens:
        """The four special tokens, whose ids follow the tokenizer's own. Needs setup()."""
        return SpecialTokens.past(self.tokenizer.vocab_size)

    @property
    def vocab_size(self) -> int:
        """The number of the tokenizer's tokens and the special ones. Needs setup()."""
        return self.special.vocab_size

    def padding(self) -> float:
        """Tokens that a micro-batch computes, over its budget: 1 for packed rows; for padded ones about the longest
        sample of the first epoch over the mean one. Needs setup()."""
        if self.layout != "padded":
            return 1.0
        lengths = self._masked(self.split.training, self.seed).lengths
        return float(lengths.max() / lengths.mean())

    def means(self) -> tuple[float, float, float]:
        """Pairs of attention, samples and labels per training token of the first epoch. Needs setup()."""
        samples = self._masked(self.split.training, self.seed)
        lengths = samples.lengths
        tokens = float(lengths.sum())
        pairs = float((lengths * lengths).sum())
        return pairs / tokens, len(lengths) / tokens, float(samples.label_counts.sum()) / tokens

    def train_dataloader(self) -> ResumableLoader:
        """The run's micro-batches for this device, from the trainer's current step on."""
        self._check()
        samples = self._masked(self.split.training, self.seed)
        return self._training(samples, {"budget": self.token_budget, "cost": self.cost, "most": samples.most})

    def val_dataloader(self) -> DataLoader[MaskedBatch] | list[DataLoader[MaskedBatch]]:  # type: ignore[override]
        """This device's rows of the first `validation_samples` held-out samples; an empty list if there are none."""
        self._check()
        held_out = self.split.validation
        if held_out is None:
            return []
        samples = self._masked(held_out, VALIDATION_SEED)
        world_size, rank = self._place()
        lengths = samples.lengths[: self.validation_samples]
        planned = rows_once(lengths, budget=self.token_budget, ranks=world_size, most=samples.most)
        rows = [samples.row(of_ranks[rank]) for of_ranks in planned]
        sampler = ListedBatches(len(lengths), rows, world_size=world_size, rank=rank)
        return evaluation_loader(samples, sampler, num_workers=self.num_workers, pin_memory=self._pin_memory())

    @property
    def held_out_samples(self) -> int:
        """Samples of each validation, over all devices. Needs setup()."""
        held_out = self.split.validation
        return 0 if held_out is None else min(self.validation_samples, len(self._masked(held_out, VALIDATION_SEED)))

    def pieces(self, spans: Spans) -> Spans:
        """The pieces that the documents of a split are cut into."""
        if self._breaks is None:
            self._breaks = TokenBreaks.of(self.tokenizer)
        longest = self.context - 2
        return split_pieces(
            self.cache.tokens,
            spans,
            self._breaks,
            unit=self.unit,
            longest=longest,
            shortest=min(self.shortest, longest),
            end_of_text=self.tokenizer.end_of_text,
        )

    def _masked(self, spans: Spans, seed: int) -> MaskedSamples:
        cache = self.cache
        return MaskedSamples(
            cache.tokens,
            self.pieces(spans),
            self.special,
            budget=self.token_budget,
            seed=seed,
            share=self.share,
            layout=self.layout,
        )
