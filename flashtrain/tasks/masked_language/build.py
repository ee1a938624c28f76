"""From settings to BERT, its data and its task: where the settings of masked-language training end."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.token_budget import Cost
from flashtrain.errors import UserError
from flashtrain.models.bert import Bert
from flashtrain.models.bert_encoder import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.batching import Batching, compiles
from flashtrain.tasks.components import make_source, make_tokenizer_spec, optimizer_builder, schedule_builder
from flashtrain.tasks.encoder_batching import choose_encoder_batching
from flashtrain.tasks.masked_language.memory import bert_estimate
from flashtrain.tasks.masked_language.steps import token_budgets, tokens_per_device
from flashtrain.tasks.masked_language.weights import read_bert
from flashtrain.training.callbacks import held_out_samples
from flashtrain.training.hardware import Hardware

TASK = "masked_language_model"

MOST_VALIDATED = 10_000  # samples of a validation, where masked.validation_samples is null

# Tokens of a padded batch over its budget, where paragraphs of 82 tokens in the mean are cut at 512: of books, and of
# Python's standard library.
PADDED_PARAGRAPHS = 6.3


def bert_config(settings: Settings, vocab_size: int, *, context: int | None = None) -> BertConfig:
    """The shape that `bert.*` names, of so many tokens. context: longest sequence (None: the settings')."""
    asked = settings.bert
    return BertConfig.of_size(
        asked.size,
        asked.family,
        vocab_size=vocab_size,
        context=settings.context if context is None else context,
        vocab_rows=asked.vocab_rows,
        dropout=asked.dropout,
        next_sentence=settings.masked.pairs,
        activation=asked.activation,
    )


def make_bert(settings: Settings, hardware: Hardware, vocab_size: int) -> Bert:
    """The model to train, with random weights or those that `weights` names.

    UserError: weights of other tokens, of a shorter context, or without the heads that the training needs.
    """
    if settings.weights is None:
        model = Bert(bert_config(settings, vocab_size), hardware.attention, settings.bert.residual)
    else:
        saved = read_bert(settings.weights)
        config = replace(saved.config, dropout=settings.bert.dropout)
        if config.vocab_size != vocab_size:
            raise UserError(
                f"the weights in {settings.weights} know {config.vocab_size} tokens, and this text is made of "
                f"{vocab_size}: train on with the data and tokenizer settings that they were trained with."
            )
        check_context(config, settings.context, settings.weights)
        if not config.masked_head or config.next_sentence != settings.masked.pairs:
            raise UserError(
                f"the weights in {settings.weights} have {'a' if config.next_sentence else 'no'} next-sentence head "
                f"and {'a' if config.masked_head else 'no'} masked one: masked.pairs={settings.masked.pairs} needs "
                "others."
            )
        model = Bert(config, hardware.attention, settings.bert.residual)
        model.load_state_dict(saved.state)
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
    estimate = bert_estimate(
        settings, hardware, model.config, model.parameter_count(), layout=layout, tokens_each=padding
    )
    return choose_encoder_batching(settings, hardware, sizes, tokens_per_device(settings), estimate)


def check_context(config: BertConfig, context: int, where: str) -> None:
    """Raise UserError where weights with learned positions are asked for more positions than they have."""
    if config.positions == "learned" and context > config.context:
        raise UserError(
            f"context={context} is longer than the {config.context} positions that the weights in {where} were "
            f"trained with: choose context={config.context} or less."
        )


def make_masked_data(settings: Settings, hardware: Hardware) -> MaskedTextDataModule:
    """The data module of these settings; its token_budget and accumulate are set once the model is known."""
    asked, workers = settings.masked, settings.data.workers
    budget = asked.token_budget or max(settings.context, tokens_per_device(settings))
    return MaskedTextDataModule(
        make_source(settings),
        make_tokenizer_spec(settings),
        settings.context,
        budget,
        unit=asked.unit,
        shortest=min(asked.shortest, settings.context),
        share=asked.share,
        pairs=asked.pairs,
        layout=asked.layout,
        cost=cost_of(settings),
        total_steps=settings.trainer.steps,
        accumulate=max(1, tokens_per_device(settings) // budget),
        seed=settings.seed,
        validation_fraction=settings.data.validation_fraction,
        validation_samples=held_out_samples(
            asked.validation_samples,
            settings.trainer.validate_every,
            settings.trainer.tokens_per_step // settings.context,  # at least so many: most are shorter
            most=MOST_VALIDATED,
        ),
        num_workers=(2 if hardware.kind == "cuda" else 0) if workers is None else workers,
        cache_dir=settings.data.cache_dir,
    )


def cost_of(settings: Settings) -> Cost:
    """What a sequence costs the model, by which the rows of a step are evened."""
    if settings.masked.balance == "tokens":
        return Cost()
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
