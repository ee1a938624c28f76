"""The LightningDataModule of packed text, which resumes with exactly the next sample.

B micro-batch on this device, S sequence (context).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from flashtrain.data.loader import (
    EvaluationSampler,
    FilledUp,
    ResumableLoader,
    Samples,
    StepSampler,
    equal_batches,
    even_batches,
    loader_options,
)
from flashtrain.data.packing import Batch, LengthWeights, PackedSamples, Spans, Split
from flashtrain.data.sources import StandardLibrarySource, TextSource, TokenSource
from flashtrain.data.text_files import FilesSource
from flashtrain.data.token_cache import OpenTokens, open_split
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec
from flashtrain.errors import UserError, at_least, between


class ResumableDataModule(pl.LightningDataModule):
    """Base class of the data modules. A subclass provides the samples.

    A run is one Lightning epoch of total_steps * accumulate micro-batches: use
    Trainer(max_epochs=1), or max_steps. A checkpoint resumes with exactly the next sample, on
    any number of devices.

    Args:
        batch_size: Samples of a micro-batch on each device.
        total_steps: Optimizer steps of the run.
        accumulate: Micro-batches of a step, as Trainer(accumulate_grad_batches=).
        seed: Seed of the order of samples.
        num_workers: Processes that build batches, on each device; 0: the
            training process builds them.

    Raises:
        UserError: Arguments out of range.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        total_steps: int = 100,
        accumulate: int = 1,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.accumulate = accumulate
        self.seed = seed
        self.num_workers = num_workers
        self._train_loader: Any = None
        self._check()

    @property
    def epochs_seen(self) -> float:
        """The number of times that the training samples have been read so far."""
        return 0.0 if self._train_loader is None else self._train_loader.epochs

    def steps_of(self, epochs: float, samples: int) -> tuple[int, float]:
        """Return the number of optimizer steps that read the training samples `epochs` times, and
        how many times these read them, since steps are whole. Needs setup().

        Args:
            samples: Samples of a step over all devices; if a row holds several samples, rows of a
                step.
        """
        whole = copy(self)  # as if one device read the whole step
        whole.batch_size, whole.accumulate = samples, 1
        sampler = whole.train_dataloader().steps
        steps = sampler.steps_of(epochs)
        # Of more steps the last one is less than a tenth, and counting takes long.
        return steps, sampler.first_number(steps) / sampler.samples if steps <= 10 else epochs

    def _training(self, samples: Any, plan: dict[str, Any] | None = None) -> ResumableLoader:
        """Return this device's loader of training batches. `plan`: arguments of TokenBudgetPlan by
        name, if samples have unequal lengths."""
        from flashtrain.data.token_budget_sampler import TokenBudgetSampler

        world_size, rank = self._place()
        make: Any = getattr(samples, "sampler", partial(StepSampler, len(samples)))
        if plan is not None:
            make = partial(TokenBudgetSampler, samples, plan)
        sampler = make(
            batch_size=self.batch_size,
            total_steps=self.total_steps,
            accumulate=self.accumulate,
            world_size=world_size,
            rank=rank,
            seed=self.seed,
        )
        self._train_loader = ResumableLoader(
            samples,
            sampler,
            trainer=self.trainer,
            num_workers=self.num_workers,
            pin_memory=self._pin_memory(),
        )
        self._train_loader.text = getattr(getattr(self, "cache", None), "key", None)
        return self._train_loader

    def _once(self, samples: Samples, count: int | None, batch_size: int) -> DataLoader[Any]:
        """Return a loader of this device's share of the first `count` samples (None: all), each at
        most once; a remainder of the division among devices is left out."""
        world_size, rank = self._place()
        count = len(samples) if count is None else min(count, len(samples))
        return self._evaluation(
            samples, even_batches(count, batch_size=batch_size, world_size=world_size, rank=rank)
        )

    def _evaluation(self, samples: Any, batches: Sequence[Any]) -> DataLoader[Any]:
        world_size, rank = self._place()
        sampler = EvaluationSampler(batches, world_size=world_size, rank=rank)
        return DataLoader(
            samples, sampler=sampler, **loader_options(self.num_workers, self._pin_memory())
        )

    def _place(self) -> tuple[int, int]:
        """Return the number of data-parallel devices, and this device's rank among them."""
        # Devices that share one sample (context or tensor parallelism) count as one here.
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (shares["num_replicas"], shares["rank"]) if shares else (1, 0)

    def _pin_memory(self) -> bool:
        if self.trainer is not None:
            return self.trainer.strategy.root_device.type == "cuda"
        return torch.cuda.is_available()

    def _check(self) -> None:
        for name in ("batch_size", "total_steps", "accumulate"):
            at_least(name, getattr(self, name), 1)
        at_least("num_workers", self.num_workers, 0)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} must be at least 0 and less than 2**32.")


class TextDataModule(ResumableDataModule):
    """The LightningDataModule of a corpus for next-token training; its batches are
    flashtrain.data.packing.Batch.

    train_dataloader() also works without a Trainer. batch_size, accumulate and total_steps may be
    changed until it is called.

    Args:
        source: Path of a file or folder of text, "stdlib" (the Python standard library's source),
            or a TextSource or TokenSource.
        tokenizer: "bytes", "bpe" (trained on the corpus), "gpt2", path of a Hugging Face folder, a
            TokenizerSpec, or a Tokenizer.
        context: S, tokens of a row.
        batch_size: B, rows of a micro-batch on each device.
        validation: Source of the held-out text (None: files named for validation, else
            validation_fraction applies).
        document_mask: Whether positions and labels respect document boundaries (see PackedSamples).
        validation_fraction: Share (0 to 1) of the documents to hold out, drawn
            independently of `seed`; 0: none.
        split_context: Context length for which documents are held out (None: `context`). Which ones
            are held out depends a little on it: to compare runs of several contexts, set the
            longest of them in every run.
        validation_samples: Maximum number of rows to read at each validation, over all devices.
        validation_batch: Rows of a micro-batch in validation (None: batch_size).
        length_weights: How often an epoch reads the training documents, by their length: see
            packing.Spans.repeated; (): all once.
        cache_dir: Folder of token files (None: files.caches.default_cache_dir()).
        **run: total_steps, accumulate, seed and num_workers: see ResumableDataModule.

    Raises:
        UserError: Arguments out of range, or the source, tokenizer or cache folder cannot be used.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | TextSource | TokenSource = "stdlib",
        tokenizer: str | TokenizerSpec | Tokenizer = "bytes",
        context: int = 256,
        batch_size: int = 8,
        *,
        validation: TextSource | None = None,
        document_mask: bool = False,
        validation_fraction: float = 0.01,
        split_context: int | None = None,
        validation_samples: int = 256,
        validation_batch: int | None = None,
        length_weights: LengthWeights = (),
        cache_dir: str | os.PathLike[str] | None = None,
        **run: int,
    ) -> None:
        if isinstance(source, str | os.PathLike):
            source = StandardLibrarySource() if source == "stdlib" else FilesSource(source)
        self.source = source
        self.validation = validation
        self.tokenizer_spec = TokenizerSpec(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.context = context
        self.document_mask = document_mask
        self.validation_fraction = validation_fraction
        self.split_context = split_context
        self.validation_samples = validation_samples
        self.validation_batch = validation_batch
        self.length_weights = length_weights
        self.cache_dir = cache_dir
        self._splits: dict[tuple[float, int], Split] = {}
        super().__init__(batch_size, **run)

    def prepare_data(self) -> None:
        """Build the token file if it is missing. Lightning calls this in one
        process per machine."""
        _ = self.cache

    def setup(self, stage: str | None = None) -> None:
        """Open the token file and split it. Lightning calls this in every process."""
        _ = self.split

    @cached_property
    def cache(self) -> OpenTokens:
        """The tokens of the source, opened for reading."""
        found = open_split(self.source, self.tokenizer_spec, self.cache_dir, self.validation)
        needs = "data.document_mask=true" if self.document_mask else "data.length_weights"
        if (self.document_mask or self.length_weights) and not found.has_documents:
            raise UserError(
                f"{needs} needs documents, but it is not known where those of these tokens end. "
                f"Set data.end_of_text=ID, or remove {needs}."
            )
        return found

    @property
    def split(self) -> Split:
        """The documents for training and for validation at the current context
        and validation_fraction."""
        context = max(self.context, self.split_context or 0)
        wanted = (self.validation_fraction, context)
        if wanted not in self._splits:  # only once: splitting may log a line
            split = self.cache.split(fraction=self.validation_fraction, context=context)
            if self.length_weights:
                training = split.training.repeated(self.length_weights, self.seed, self.context)
                split = split._replace(training=training)
            self._splits[wanted] = split
        return self._splits[wanted]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return self.cache.tokenizer

    @property
    def train_tokens(self) -> int:
        """The number of tokens of the training documents, each document's end_of_text included."""
        return self.split.training.tokens

    @property
    def validation_tokens(self) -> int:
        """The number of tokens of the held-out documents."""
        return self.split.validation.tokens if self.split.validation is not None else 0

    @property
    def held_out_samples(self) -> int:
        """The number of rows that each validation reads, over all devices."""
        held_out = self.split.validation
        return 0 if held_out is None else min(self.validation_samples, len(self._samples(held_out)))

    def scored(self) -> dict[str, int]:
        """Count the tokens that a validation reads, and the documents if it
        reads every document whole."""
        held_out = self.split.validation if self.validation_fraction == 1 else None
        if isinstance(held_out, Spans):
            return {"documents": len(held_out.begins), "tokens": held_out.tokens}
        return {"tokens": self.held_out_samples * self.context}

    def describe(self) -> str:
        """Describe the corpus in one line: source, tokenizer, counts, and the
        folder of the token file."""
        documents = f"{self.cache.documents:,} document{'s' * (self.cache.documents != 1)}"
        for limit, weight in sorted(self.length_weights):
            documents += f", of {limit:,} tokens and more {weight:g} times"
        return (
            f"{self.source.describe()} | {self.tokenizer.describe()} | {documents}, "
            f"{self.train_tokens:,} tokens to train on, {self.validation_tokens:,} held out | "
            f"{self.cache.folder}"
        )

    def train_dataloader(self) -> ResumableLoader:
        """Return the run's micro-batches for this device, from the trainer's current step on."""
        self._check()
        return self._training(self._samples(self.split.training))

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return this device's part of the validation samples; an empty list
        if none are held out."""
        self._check()
        held_out = self.split.validation
        if held_out is None:
            return []
        batch_size, (world_size, rank) = self.validation_batch or self.batch_size, self._place()
        mine = equal_batches(
            self.held_out_samples, batch_size=batch_size, world_size=world_size, rank=rank
        )
        return self._evaluation(FilledUp(self._samples(held_out)), mine)

    def epochs_of_parts(self, samples: int) -> str | None:
        """Describe how many epochs of each source of a mixture `samples` samples make;
        None for a single source."""
        if getattr(self.cache, "samples", None) is None:
            return None
        mixed: Any = self._samples(self.split.training)
        return mixed.epochs(samples)

    def _samples(self, spans: Spans) -> PackedSamples:
        cache = self.cache
        if (mixed := getattr(cache, "samples", None)) is not None:
            return mixed(
                spans,
                self.context,
                self.document_mask,
                in_proportion=spans is self.split.validation,
            )
        whole = self.validation_fraction == 1
        return PackedSamples(cache.tokens, spans, self.context, self.document_mask, whole=whole)

    def _check(self) -> None:
        super()._check()
        at_least("context", self.context, 1)
        at_least("validation_samples", self.validation_samples, 1)
        between("validation_fraction", self.validation_fraction, 0, 1)
        if self.trainer is None:
            return
        module = self.trainer.lightning_module
        automatic = module is None or module.automatic_optimization
        if automatic and self.trainer.accumulate_grad_batches != self.accumulate:
            raise UserError(
                f"TextDataModule(accumulate={self.accumulate}) and Trainer(accumulate_grad_batches="
                f"{self.trainer.accumulate_grad_batches}) must be the same number."
            )
        # An attribute that Lightning sets without declaring it.
        if getattr(self.trainer, "overfit_batches", 0):
            raise UserError(
                "Trainer(overfit_batches=...) would replace the order of samples. "
                "Use limit_train_batches instead."
            )
