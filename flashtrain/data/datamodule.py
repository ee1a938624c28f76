"""Text in, packed batches out: the LightningDataModule that resumes with exactly the next sample.

B micro-batch on this device, S sequence (context).
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from flashtrain.data.loader import FixedSampler, ResumableLoader, Samples, StepSampler, evaluation_loader
from flashtrain.data.packing import Batch, PackedSamples, Spans, Split
from flashtrain.data.sources import StandardLibrarySource, TextSource, TokenSource
from flashtrain.data.text_files import FilesSource
from flashtrain.data.token_cache import OpenTokens, open_split
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec
from flashtrain.errors import UserError, at_least, between


class ResumableDataModule(pl.LightningDataModule):
    """A subclass sets batch_size (B), total_steps, accumulate, seed and num_workers, and says which samples there are.

    A run is one Lightning epoch of total_steps * accumulate micro-batches. A checkpoint resumes with exactly the next
    sample, however many devices it goes on with.
    """

    batch_size: int
    total_steps: int
    accumulate: int
    seed: int
    num_workers: int

    def __init__(self) -> None:
        super().__init__()
        self._train_loader: ResumableLoader | None = None

    @property
    def epochs_seen(self) -> float:
        """How often the training samples have been read so far, 1.0 being every one once."""
        if self._train_loader is None:
            return 0.0
        return self._train_loader.samples_read / len(self._train_loader.packed)

    def _training(self, samples: Any, plan: dict[str, Any] | None = None) -> ResumableLoader:
        """The run's micro-batches of these samples for this device. plan: of rows of samples of many lengths (see
        TokenBudgetPlan)."""
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
            samples, sampler, trainer=self.trainer, num_workers=self.num_workers, pin_memory=self._pin_memory()
        )
        return self._train_loader

    def _once(self, samples: Samples, count: int | None, batch_size: int) -> DataLoader[Any]:
        """This device's share of the first `count` of these samples (None: all), each once."""
        world_size, rank = self._place()
        count = len(samples) if count is None else min(count, len(samples))
        sampler = FixedSampler(count, batch_size=batch_size, world_size=world_size, rank=rank)
        return evaluation_loader(samples, sampler, num_workers=self.num_workers, pin_memory=self._pin_memory())

    def _place(self) -> tuple[int, int]:
        """How many data-parallel devices there are, and which of them this is."""
        # A strategy that shares one sample among devices (context, tensor parallelism) counts those as one here.
        shares = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (shares["num_replicas"], shares["rank"]) if shares else (1, 0)

    def _pin_memory(self) -> bool:
        if self.trainer is not None:
            return self.trainer.strategy.root_device.type == "cuda"
        return torch.cuda.is_available()


class TextDataModule(ResumableDataModule):
    """Packed batches (flashtrain.data.packing.Batch) of a corpus for next-token training.

    source: the path of a file or folder of text, "stdlib" (the Python standard library's source), or a TextSource or
        TokenSource.
    tokenizer: "bytes", "bpe" (trained on the corpus), "gpt2", a folder's path (tokenizers.huggingface_tokenizer), a
        TokenizerSpec, or a Tokenizer.
    validation: what is held out, as a source of its own (None: files that are named for it, else validation_fraction).
    context: S, in tokens. batch_size: B, rows of a micro-batch on each device.
    total_steps: optimiser steps of the run. accumulate: micro-batches a step, as Trainer(accumulate_grad_batches=).
    seed: of the order of samples. document_mask: see PackedSamples.
    validation_fraction: of the documents, held out by a draw that does not depend on `seed`; 0 for no validation.
    split_context: hold out as for samples of this length (None: `context`). What is held out depends a little on it, so
        runs of several contexts that are to be compared name the longest.
    validation_samples: rows read at each validation, over all devices; fewer when fewer are held out.
    validation_batch: rows of a micro-batch there (None: batch_size).
    num_workers: processes that build batches, on each device; 0 builds them in the training process.
    cache_dir: where the token file lives (flashtrain.files.caches says where otherwise).

    A run is one Lightning epoch of total_steps * accumulate micro-batches: use Trainer(max_epochs=1), or max_steps.
    A checkpoint resumes with exactly the next sample, however many devices it goes on with. Works without a Trainer,
    too: train_dataloader(). batch_size, accumulate and total_steps may be set anew until then.

    `tokenizer`, `train_tokens` and `validation_tokens` (counts) and `cache` (the open token file) are there when they
    are first asked for. Raises UserError for arguments out of range, and for what the source, the tokenizer and the
    cache folder object to.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | TextSource | TokenSource = "stdlib",
        tokenizer: str | TokenizerSpec | Tokenizer = "bytes",
        context: int = 256,
        batch_size: int = 8,
        *,
        validation: TextSource | None = None,
        total_steps: int = 100,
        accumulate: int = 1,
        seed: int = 0,
        document_mask: bool = False,
        validation_fraction: float = 0.01,
        split_context: int | None = None,
        validation_samples: int = 256,
        validation_batch: int | None = None,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(source, str | os.PathLike):
            source = StandardLibrarySource() if source == "stdlib" else FilesSource(source)
        self.source = source
        self.validation = validation
        self.tokenizer_spec = TokenizerSpec(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.context = context
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.accumulate = accumulate
        self.seed = seed
        self.document_mask = document_mask
        self.validation_fraction = validation_fraction
        self.split_context = split_context
        self.validation_samples = validation_samples
        self.validation_batch = validation_batch
        self.num_workers = num_workers
        self.cache_dir = Path(cache_dir) if cache_dir is not None else None
        self._cache: OpenTokens | None = None
        self._split: Split | None = None
        self._split_of: tuple[float, int] | None = None
        self._check()

    def prepare_data(self) -> None:
        """Build the token file where it is missing. Lightning calls this in one process a machine."""
        if self._cache is None:
            opened = open_split(self.source, self.tokenizer_spec, self.cache_dir, self.validation)
            if self.document_mask and not opened.has_documents:
                raise UserError(
                    "data.document_mask=true keeps attention within documents, and it is not known where the documents "
                    "of these tokens end. Set data.end_of_text=ID."
                )
            self._cache = opened

    def setup(self, stage: str | None = None) -> None:
        """Open the token file and split it. Lightning calls this in every process."""
        _ = self.split

    @property
    def cache(self) -> OpenTokens:
        """The open token file."""
        self.prepare_data()
        return cast(OpenTokens, self._cache)

    @property
    def split(self) -> Split:
        """Which documents train and which validate, with the context and the fraction as they stand."""
        context = self.context if self.split_context is None else max(self.context, self.split_context)
        wanted = (self.validation_fraction, context)
        if self._split is None or self._split_of != wanted:  # it may have something to say, once
            self._split = self.cache.split(fraction=self.validation_fraction, context=context)
            self._split_of = wanted
        return self._split

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return self.cache.tokenizer

    @property
    def train_tokens(self) -> int:
        """Tokens of the training documents, each document's end_of_text included."""
        return self.split.training.tokens

    @property
    def validation_tokens(self) -> int:
        """Tokens of the held-out documents."""
        return self.split.validation.tokens if self.split.validation is not None else 0

    @property
    def held_out_samples(self) -> int:
        """Rows of each validation, over all devices."""
        held_out = self.split.validation
        return 0 if held_out is None else min(self.validation_samples, len(self._samples(held_out)))

    def scored(self) -> dict[str, int]:
        """What a validation reads: tokens, and documents where it reads all of them whole."""
        held_out = self.split.validation if self.validation_fraction == 1 else None
        if isinstance(held_out, Spans):
            return {"documents": len(held_out.begins), "tokens": held_out.tokens}
        return {"tokens": self.held_out_samples * self.context}

    def describe(self) -> str:
        """The corpus in one line: source, tokenizer, counts, and where the tokens lie."""
        return (
            f"{self.source.describe()} | {self.tokenizer.describe()} | {self.cache.documents:,} documents, "
            f"{self.train_tokens:,} tokens to train on, {self.validation_tokens:,} held out | {self.cache.folder}"
        )

    def train_dataloader(self) -> ResumableLoader:
        """The run's micro-batches for this device, from the step that the trainer stands at."""
        self._check()
        return self._training(self._samples(self.split.training))

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """This device's share of the first `validation_samples` held-out samples; an empty list where none are."""
        self._check()
        held_out = self.split.validation
        if held_out is None:
            return []
        return self._once(self._samples(held_out), self.validation_samples, self.validation_batch or self.batch_size)

    def epochs_of_parts(self, samples: int) -> str | None:
        """How often so many samples read each source of a mixture, in words; None of a single source."""
        if getattr(self.cache, "samples", None) is None:
            return None
        mixed: Any = self._samples(self.split.training)
        return mixed.epochs(samples)

    def _samples(self, spans: Spans) -> PackedSamples:
        cache = self.cache
        mixed = getattr(cache, "samples", None)
        if mixed is not None:
            return mixed(spans, self.context, self.document_mask, in_proportion=spans is self.split.validation)
        whole = self.validation_fraction == 1
        return PackedSamples(cache.tokens, spans, self.context, self.document_mask, whole=whole)

    def _check(self) -> None:
        for name in ("context", "batch_size", "total_steps", "accumulate", "validation_samples"):
            at_least(name, getattr(self, name), 1)
        at_least("num_workers", self.num_workers, 0)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed={self.seed} must be at least 0 and less than 2**32.")
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
        if getattr(self.trainer, "overfit_batches", 0):  # an attribute that Lightning sets without declaring it
            raise UserError(
                "Trainer(overfit_batches=...) would replace the order of samples. Use limit_train_batches instead."
            )
