"""A trained BERT and its tokenizer, back from a run, an export of ours, or Hugging Face."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain.data.balance import Cost
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.tokenizers import Tokenizer, holds_tokenizer, load_tokenizer
from flashtrain.data.wordpiece import SpecialTokens, WordPieceTokenizer
from flashtrain.errors import UserError, at_least
from flashtrain.folders.run_folder import BEST, CONFIG_FILE, TOKENIZER, find_checkpoint
from flashtrain.integrations import load_bert, save_tokenizer
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings, divisors
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.batching import Batching, choose_micro_batch, compiles, encoder_shape
from flashtrain.tasks.components import (
    loader_workers,
    make_sources,
    make_tokenizer_spec,
    optimizer_builder,
    schedule_builder,
)
from flashtrain.training.callbacks import held_out_samples
from flashtrain.training.checkpoints import read_checkpoint, weights_in
from flashtrain.training.encoder_memory import PredictingHead, estimate_encoder_memory
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import MemoryEstimate
from flashtrain.training.memory_choice import Estimate


@dataclass
class SavedBert:
    """config and state rebuild the model (models.Bert). tokenizer: None where there is none next to the weights.

    folder: of the run, or of the weights. path: the file. step: optimiser steps it was trained for; 0 where unknown.
    """

    config: BertConfig
    state: dict[str, Tensor]
    tokenizer: Tokenizer | None
    folder: Path
    path: Path
    step: int = 0

    @property
    def special(self) -> SpecialTokens:
        """The special tokens that the model was trained with. UserError: no tokenizer."""
        return special_tokens(self.needed_tokenizer())

    def needed_tokenizer(self) -> Tokenizer:
        """The tokenizer. UserError: there is none, or one of more tokens than the weights know."""
        if self.tokenizer is None:
            raise UserError(
                f"no tokenizer next to the weights in {self.folder}. Expected a run folder, an export, or "
                "a Hugging Face folder with vocab.txt or tokenizer.json."
            )
        tokens, known = special_tokens(self.tokenizer).vocab_size, self.config.vocab_size
        if tokens > known:  # of a token past them no row would be looked up
            raise UserError(
                f"{self.folder}: its tokenizer makes {tokens:,} tokens, and its weights know {known:,}: expected the "
                "tokenizer that they were trained with."
            )
        return self.tokenizer


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """[PAD], [CLS], [SEP] and [MASK]: a WordPiece tokenizer's own, or four past the others'."""
    if isinstance(tokenizer, WordPieceTokenizer):
        return tokenizer.special
    return SpecialTokens.past(tokenizer.vocab_size)


def save_encoder_tokenizer(tokenizer: Tokenizer, folder: Path, config: BertConfig) -> str:
    """Write the tokenizer of an encoder of this shape into its export, as integrations.save_tokenizer does."""
    context = config.context if config.positions == "learned" else None
    special = special_tokens(tokenizer)
    return save_tokenizer(tokenizer, folder, context=context, special=special, segments=config.segments > 0)


def read_bert(given: str | Path) -> SavedBert:
    """The BERT that `given` names: a run folder or checkpoint (its best weights), an export of ours, or a Hugging Face
    folder or safetensors file with config.json beside. UserError: anything else."""
    path = Path(given).expanduser()
    if path.suffix == ".ckpt" or (path / CONFIG_FILE).is_file():
        return _of_run(str(given))
    folder = path if path.is_dir() else path.parent
    config, state = load_bert(path)
    tokenizer = load_tokenizer(folder) if holds_tokenizer(folder) else WordPieceTokenizer.load(folder)
    return SavedBert(config, state, tokenizer, folder, path)


def _of_run(given: str) -> SavedBert:
    folder, path = find_checkpoint(given, prefer=BEST)
    saved = read_checkpoint(path)
    notes = saved.get("flashtrain") or {}
    if notes.get("name") != "bert":
        raise UserError(f"{path} holds no BERT. Expected a run with task=masked_language_model.")
    state = weights_in(saved, path, prefix="model.")
    config, tokenizer = BertConfig(**notes["shape"]), load_tokenizer(folder / TOKENIZER)
    return SavedBert(config, state, tokenizer, folder, path, saved["global_step"])


WITHOUT_GPU = 16384  # tokens of a row, at most, where masked.token_budget=null and no GPU's memory says how many


def tokens_per_device(settings: Settings) -> int:
    """Tokens of an optimiser step on one device."""
    return settings.trainer.tokens_per_step // settings.trainer.ranks


def token_budgets(settings: Settings, *, gpu: bool) -> int | list[int]:
    """What a row may hold: as requested, or each part of a device's tokens that holds the longest sample, ascending."""
    if settings.masked.token_budget is not None:
        return settings.masked.token_budget
    found = [size for size in divisors(tokens_per_device(settings)) if size >= settings.context]
    return found if gpu else [size for size in found if size <= WITHOUT_GPU] or found[:1]


def check_masked_step(settings: Settings) -> None:
    """Raise UserError unless a step is whole rows for each device, and a row holds the longest sample."""
    budget, ranks, context = settings.masked.token_budget, settings.trainer.ranks, settings.context
    at_least("context", context, 3)  # a token and the special ones
    at_least("masked.token_budget", budget, context)  # the longest sample
    tokens, unit = settings.trainer.tokens_per_step, 1 if budget is None else budget
    if tokens % (unit * ranks):
        near = max(1, tokens // (unit * ranks)) * unit * ranks
        rows = "" if budget is None else f"masked.token_budget={budget} tokens on "
        raise UserError(
            f"trainer.tokens_per_step={tokens} must be a multiple of {rows}{ranks} "
            f"{'device' if ranks == 1 else 'devices'}. Use {near}."
        )
    if tokens_per_device(settings) < context:
        raise UserError(
            f"trainer.tokens_per_step={tokens} gives a device {tokens_per_device(settings)} tokens, and the longest "
            f"sample has context={context}."
        )
    if settings.trainer.micro_batch is not None:
        raise UserError(
            f"trainer.micro_batch={settings.trainer.micro_batch} counts samples of one length. "
            "Use masked.token_budget, the tokens that a device computes at once."
        )


def bert_estimate(
    settings: Settings,
    hardware: Hardware,
    config: BertConfig,
    parameters: int,
    *,
    layout: str,
    tokens_each: float = 1,
    share: float = 0.0,
) -> Estimate:
    """The estimate for micro-batches of so many times `tokens_each` tokens, padding included, of a model of this shape.

    layout: packed, or padded, which is not compiled. share: of the tokens, masked."""
    shape = encoder_shape(config, residual=settings.bert.residual)

    def estimate(size: int, savings: MemorySavings) -> MemoryEstimate:
        tokens = math.ceil(size * tokens_each)
        labels = math.ceil(share * tokens)
        return estimate_encoder_memory(
            parameters,
            shape,
            tokens=tokens,
            longest=settings.context,
            head=PredictingHead(config.vocab_rows, labels) if config.masked_head else None,
            precision=hardware.precision,
            savings=savings,
            compiled=compiles(settings, hardware, layout),
            attention=hardware.attention,
            master_weights=settings.optimizer.master_weights,
        )

    return estimate


TASK = "masked_language_model"

MOST_VALIDATED = 10_000  # samples of a validation, where masked.validation_samples is null

# Tokens of a padded batch over its budget, where paragraphs of 82 tokens in the mean are cut at 512: of books, and of
# Python's standard library.
PADDED_PARAGRAPHS = 6.3


def bert_config(settings: Settings, vocab_size: int) -> BertConfig:
    """The shape that `bert.*` names, of so many tokens."""
    bert = settings.bert
    return BertConfig.of_size(
        bert.size,
        bert.family,
        vocab_size=vocab_size,
        context=settings.context,
        vocab_rows=bert.vocab_rows,
        dropout=bert.dropout,
        activation=bert.activation,
    )


def make_bert(settings: Settings, hardware: Hardware, vocab_size: int) -> Bert:
    """The model to train, with random weights or those that `weights` names.

    UserError: weights of other tokens, of a shorter context, or without a masked-language head.
    """
    if settings.weights is None:
        model = Bert(bert_config(settings, vocab_size), hardware.attention, settings.bert.residual)
    else:
        saved = read_bert(settings.weights)
        # A next-sentence head and its pooler are left out: the samples are single pieces.
        config = replace(saved.config, dropout=settings.bert.dropout, pooler=False, next_sentence=False)
        if config.vocab_size != vocab_size:
            raise UserError(
                f"the weights in {settings.weights} know {config.vocab_size} tokens, and this text is made of "
                f"{vocab_size}. Use the data and tokenizer settings that they were trained with."
            )
        check_context(config, settings.context, settings.weights)
        if not config.masked_head:
            raise UserError(
                f"the weights in {settings.weights} have no masked-language head to train. Use weights that have one."
            )
        model = Bert(config, hardware.attention, settings.bert.residual)
        model.load_state_dict({name: saved.state[name] for name in model.state_dict()})
    return model


def choose_masked_batching(
    settings: Settings, hardware: Hardware, model: Bert, padding: float | None = None
) -> Batching:
    """How many tokens a row holds, and the memory savings.

    padding: of MaskedDataModule.padding; None: the text is not read yet, and taken to be as uneven as most."""
    sizes = token_budgets(settings, gpu=hardware.kind == "cuda")
    layout = settings.masked.layout
    if padding is None:
        padding = PADDED_PARAGRAPHS if layout == "padded" else 1.0
    parameters, share = model.parameter_count(), settings.masked.share
    estimate = bert_estimate(
        settings, hardware, model.config, parameters, layout=layout, tokens_each=padding, share=share
    )
    return choose_micro_batch(settings, hardware, sizes, tokens_per_device(settings), estimate)


def check_context(config: BertConfig, context: int, where: str) -> None:
    """Raise UserError where weights with learned positions would need more positions than they have."""
    if config.positions == "learned" and context > config.context:
        raise UserError(
            f"context={context} is longer than the {config.context} positions that the weights in {where} were "
            f"trained with. Use context={config.context} or less."
        )


def make_masked_data(settings: Settings, hardware: Hardware) -> MaskedTextDataModule:
    """The data module of these settings; its token_budget and accumulate are set once the model is known."""
    if settings.data.streaming:
        raise UserError("data.streaming=true supports language models only. Use data.streaming=false.")
    masked, (source, validation) = settings.masked, make_sources(settings)
    whole = masked.validation_samples is None and settings.data.validation_fraction == 1
    budget = masked.token_budget or max(settings.context, tokens_per_device(settings))
    return MaskedTextDataModule(
        source,
        make_tokenizer_spec(settings),
        settings.context,
        budget,
        unit=masked.unit,
        shortest=min(masked.shortest, settings.context),
        share=masked.share,
        layout=masked.layout,
        cost=cost_of(settings),
        total_steps=settings.trainer.steps,
        accumulate=max(1, tokens_per_device(settings) // budget),
        seed=settings.seed,
        validation=validation,
        validation_fraction=settings.data.validation_fraction,
        validation_samples=sys.maxsize
        if whole
        else held_out_samples(
            masked.validation_samples,
            settings.trainer.validate_every,
            settings.trainer.tokens_per_step // settings.context,  # at least so many: most are shorter
            most=MOST_VALIDATED,
        ),
        num_workers=loader_workers(settings.data.workers, hardware),
        cache_dir=settings.data.cache_dir,
    )


def cost_of(settings: Settings) -> Cost:
    """What a sequence costs the model, by which the rows of a step are evened."""
    config = bert_config(settings, vocab_size=30522)  # the vocabulary adds to each token alike
    return Cost(config.cost_per_token(settings.masked.share), config.cost_per_pair())


def make_masked_task(
    settings: Settings, hardware: Hardware, model: Bert, description: dict[str, Any]
) -> MaskedLanguageModel:
    """The task that trains this model as the settings say: its optimiser, schedule, clipping and compilation."""
    return MaskedLanguageModel(
        model,
        make_optimizer=optimizer_builder(settings),
        make_schedule=schedule_builder(settings),
        gradient_clip=settings.optimizer.gradient_clip,
        compile=compiles(settings, hardware, settings.masked.layout),
        cuda_graphs=settings.trainer.cuda_graphs,
        description=description,
    )


def describe_bert(model: Bert, settings: Settings) -> dict[str, Any]:
    """What a checkpoint says of its model, in plain values."""
    return {
        "task": TASK,
        "name": "bert",
        "size": settings.bert.size,
        "vocab_size": model.config.vocab_size,
        "shape": asdict(model.config),
    }
