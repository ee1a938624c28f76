"""The LightningDataModule of supervised fine-tuning: packed batches of conversations, with
labels on the answers.

data = ChatDataModule("chats.jsonl", "MODEL_FOLDER", context=8192, batch_size=2, total_steps=1000)
"""

from __future__ import annotations

import os
from typing import Any, get_args

import numpy as np
from torch.utils.data import DataLoader

from flashtrain.announce import say
from flashtrain.data.chat_samples import COST, ChatDocuments, ChatSamples, label_counts
from flashtrain.data.chat_source import ChatFiles, ChatRows, ChatSource
from flashtrain.data.chat_template import ChatTemplate
from flashtrain.data.datamodule import TextDataModule
from flashtrain.data.huggingface_tokenizer import as_huggingface
from flashtrain.data.loader import ResumableLoader
from flashtrain.data.packing import ChatBatch, Split
from flashtrain.data.special_tokens import tokenizer_for
from flashtrain.data.token_budget import rows_once
from flashtrain.data.token_cache import GOES_ON
from flashtrain.data.tokenizers import Tokenizer, TokenizerSpec, make_tokenizer
from flashtrain.errors import UserError, one_of
from flashtrain.settings import options

TOO_LONG = get_args(options.TooLong)
# Conversations to choose from when a step's rows are filled: a few long ones leave
# much of the rows empty.
LOOK_AHEAD = 128


class ChatDataModule(TextDataModule):
    """The LightningDataModule of conversations, to train on what the assistant says; its
    batches are ChatBatches.

    Validation reads `validation`, or the files that are named for validation, or else
    conversations held out at random.

    Args:
        source: Path of a .jsonl or .parquet file or of a folder of them, or ChatRows (such as
            chat_source.ChatDataset).
        tokenizer: A Hugging Face folder, or the tokenizer from one.
        template: Jinja that replaces the tokenizer's own chat template.
        train_on: Which tokens get labels, "assistant" or "all".
        too_long: What happens to a document longer than the context: "cut" (its first
            tokens are read), "drop" or "refuse". A document without a label within the
            context is always left out.
        skip_broken: Maximum share (0 to 1) of malformed rows, which are skipped; more are an error.
        text_column: Column of the text, for rows of plain text.
        check_answers: Whether to refuse rows of which the template writes no answer, and to give no
            labels to messages with "weight": 0.
        validation: Source of the conversations to validate on (None: see above).
        **options: See TextDataModule, also for context, batch_size and document_mask.
            validation_samples counts rows.

    Raises:
        UserError: Arguments out of range, no chat template where one is needed, broken
            rows, nothing to learn.
    """

    # For training and for validation; setup() makes them.
    documents: tuple[ChatDocuments, ChatDocuments]
    # Whether validation rows are as long as the longest conversation, not as the context.
    short_rows = False

    def __init__(
        self,
        source: str | os.PathLike[str] | ChatRows,
        tokenizer: str | os.PathLike[str] | TokenizerSpec | Tokenizer,
        context: int = 4096,
        batch_size: int = 1,
        *,
        template: str | None = None,
        train_on: str = "assistant",
        text_column: str = "text",
        check_answers: bool = True,
        too_long: str = "cut",
        skip_broken: float = 0.0,
        validation: ChatRows | None = None,
        document_mask: bool = True,
        **options: Any,
    ) -> None:
        one_of("data.too_long", too_long, TOO_LONG)
        rows = ChatFiles(source) if isinstance(source, str | os.PathLike) else source
        if isinstance(tokenizer, str | os.PathLike):
            tokenizer = TokenizerSpec(str(tokenizer))
        made = as_huggingface(make_tokenizer(tokenizer))
        self.template = ChatTemplate(
            tokenizer_for(rows, made), template, train_on, text_column, check_answers
        )
        self.too_long = too_long
        super().__init__(
            ChatSource(rows, self.template, skip_broken=skip_broken),
            made,
            context,
            batch_size,
            validation=None
            if validation is None
            else ChatSource(validation, self.template, skip_broken=skip_broken),
            document_mask=document_mask,
            **options,
        )

    def setup(self, stage: str | None = None) -> None:
        """Open the token file, hold out conversations and cut documents. Call `setup` again after a
        change of `context`."""
        cache, fraction = self.cache, self.validation_fraction
        offsets, marks = cache.offsets, cache.marks[:]
        # Of which conversation each document is.
        self._conversation = np.cumsum((marks[offsets[:-1]] & GOES_ON) == 0) - 1
        conversations = int(self._conversation[-1]) + 1
        first = 0  # conversation that may be held out
        if cache.held_out is None:
            held_out = round(fraction * conversations)
            if 0 < fraction < 1:
                held_out = min(conversations - 1, max(1, held_out))
        else:
            first = int(self._conversation[cache.held_out][0])
            held_out = conversations - first if fraction else 0
        # Each conversation's place in a random order that depends on no setting. RandomState's
        # stream is frozen: the split stays the same under every version of numpy.
        places = np.argsort(np.random.RandomState(0).permutation(conversations - first))
        place = np.concatenate((np.full(first, conversations), places))[self._conversation]
        found = self._cut(
            ChatDocuments(offsets[:-1], np.diff(offsets), np.empty(0, dtype=np.int64)), marks
        )
        useful = found.label_counts > 0
        # A validation reads the first held-out documents: they are in random order already.
        drawn = np.argsort(place, kind="stable")
        training = found.chosen(
            useful & ~(place < held_out if cache.held_out is None else cache.held_out)
        )
        self.documents = training, found.chosen(drawn[useful[drawn] & (place[drawn] < held_out)])
        if not len(training.begins) and fraction != 1:
            raise UserError(
                f"{self.source.describe()}: "
                f"no conversation has a label within context={self.context}. Use a longer context."
            )

    @property
    def split(self) -> Split:
        """Not available: conversations cannot be cut into windows of text (as for
        mode=lengths). Raises UserError."""
        raise UserError(
            "data=chat cannot be cut into windows of text. Use data=files, data=hub or data=stdlib."
        )

    @property
    def train_tokens(self) -> int:
        """The number of tokens of the training documents within the context,
        with and without labels."""
        return int(self.documents[0].lengths.sum())

    @property
    def validation_tokens(self) -> int:
        """The number of tokens of the held-out documents within the context."""
        return int(self.documents[1].lengths.sum())

    @property
    def held_out_samples(self) -> int:
        """The number of rows that each validation reads over all devices: its tokens divided by the
        context, rounded up."""
        return -(-int(self._validated().lengths.sum()) // self.context)

    def scored(self) -> dict[str, int]:
        """Count the conversations, tokens and labels that a validation reads. Needs setup()."""
        read = self._validated()
        if self._cut_note:  # a training says so with `describe`
            say(f"{self.source.describe()}: {self._cut_note.removeprefix('; ')}")
        conversations = np.unique(
            self._conversation[np.searchsorted(self.cache.offsets, read.begins)]
        )
        tokens, labels = int(read.lengths.sum()), int(read.label_counts.sum())
        return {"conversations": len(conversations), "tokens": tokens, "labels": labels}

    def describe(self) -> str:
        """Describe the corpus in one line. Needs setup()."""
        training = self.documents[0]
        conversations, count = int(self._conversation[-1]) + 1, self.cache.documents
        documents = f" in {count:,} documents" if count != conversations else ""
        return (
            f"{self.source.describe()} | {self.tokenizer.describe()} | {conversations:,} "
            f"conversations{documents}, {self.train_tokens:,} tokens to train on, "
            f"{int(training.label_counts.sum()):,} of them to learn, {self.validation_tokens:,} "
            f"tokens held out{self._cut_note} | {self.cache.folder}"
        )

    def train_dataloader(self) -> ResumableLoader:
        """Return the run's micro-batches for this device, from the trainer's current step on."""
        self._check()
        samples = self._chats(self.documents[0])
        tokens = min(0.5, LOOK_AHEAD / len(samples)) * samples.tokens  # of an epoch
        rows = self.batch_size * self.accumulate * self._place()[0]
        look_ahead = max(2.0, tokens / (rows * self.context))
        # Rows are filled first, and balanced as far as that allows.
        plan = {"budget": self.context, "cost": COST, "look_ahead": look_ahead, "tolerance": np.inf}
        return self._training(samples, plan)

    def val_dataloader(self) -> DataLoader[ChatBatch] | list[DataLoader[ChatBatch]]:  # type: ignore[override]
        """Return this device's part of the validation rows; an empty list if
        nothing is held out."""
        self._check()
        held_out = self._validated()
        if not len(held_out.begins):
            return []
        samples, size = self._chats(held_out), self.validation_batch or self.batch_size
        if self.short_rows:
            tokens, samples.context = size * self.context, int(held_out.lengths.max())
            size = max(1, min(tokens, samples.tokens) // samples.context)
        world_size, rank = self._place()
        steps = rows_once(
            samples.lengths, budget=samples.context, ranks=size * world_size, cost=COST
        )
        place = {"rank": rank, "world_size": world_size}
        mine = [
            one for rows in steps for one in samples.micro_batches(rows, batch_size=size, **place)
        ]
        return self._evaluation(samples, mine)

    def _chats(self, documents: ChatDocuments) -> ChatSamples:
        strategy = None if self.trainer is None else self.trainer.strategy
        shared = bool(getattr(strategy, "shares_sequences", False))
        return ChatSamples(self.cache, documents, self.context, self.document_mask, shared=shared)

    def _validated(self) -> ChatDocuments:
        held_out = self.documents[1]
        max_tokens = min(self.validation_samples, 2**40) * self.context
        room = np.searchsorted(held_out.lengths.cumsum(), max_tokens, side="right")
        return held_out.chosen(np.arange(min(len(held_out.begins), max(1, int(room)))))

    def _cut(self, documents: ChatDocuments, marks: np.ndarray) -> ChatDocuments:
        """Return the documents cut to the context, with the number of labels of each, which is 0 if
        the document is left out. `marks` are those of all tokens (token_cache)."""
        longer = documents.lengths > self.context
        count, longest = int(longer.sum()), int(documents.lengths.max())
        words = (
            f"{count:,} documents are longer than context={self.context} (up to {longest:,} tokens)"
        )
        if count and self.too_long == "refuse":
            raise UserError(
                f"{words}, and data.too_long=refuse. "
                "Use a longer context, or data.too_long=cut or drop."
            )
        lengths = np.minimum(documents.lengths, self.context)
        labels = label_counts(marks, documents.begins, lengths)
        dropped = longer if self.too_long == "drop" else np.zeros_like(longer)
        without = int((labels[~dropped] == 0).sum())
        labels[dropped] = 0
        self._cut_note = f"; {words} and {'left out' if dropped.any() else 'cut'}" if count else ""
        self._cut_note += (
            f"; {without:,} have nothing to learn within it and are left out" if without else ""
        )
        return ChatDocuments(documents.begins, lengths, labels)
