"""From settings to a language model's data and task: where the settings of its training end."""

from __future__ import annotations

from typing import Any

from flashtrain.data.datamodule import TextDataModule
from flashtrain.models.memory_savings import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.batching import compiles
from flashtrain.tasks.components import make_source, make_tokenizer_spec, optimizer_builder, schedule_builder
from flashtrain.training.callbacks import held_out_samples
from flashtrain.training.hardware import Hardware

MOST_VALIDATION_TOKENS = 524_288  # of each validation, where data.validation_tokens says nothing


def make_task(settings: Settings, hardware: Hardware, model: Trainable, description: dict[str, Any]) -> LanguageModel:
    """The task that trains this model as the settings say: its optimiser, schedule, clipping and compilation."""
    return LanguageModel(
        model,
        make_optimizer=optimizer_builder(settings),
        make_schedule=schedule_builder(settings),
        document_mask=settings.data.document_mask,
        gradient_clip=settings.optimizer.gradient_clip,
        compile=compiles(settings, hardware),
        cuda_graphs=settings.trainer.cuda_graphs,
        description=description,
    )


def make_data(settings: Settings, hardware: Hardware) -> TextDataModule:
    """The data module of these settings; its micro-batch is set once the model is known."""
    workers, asked = settings.data.workers, settings.data.validation_tokens
    return TextDataModule(
        make_source(settings),
        make_tokenizer_spec(settings),
        settings.context,
        batch_size=settings.samples_per_step // settings.data_ranks,
        total_steps=settings.trainer.steps,
        seed=settings.seed,
        document_mask=settings.data.document_mask,
        validation_fraction=settings.data.validation_fraction,
        split_context=settings.data.split_context,
        validation_samples=held_out_samples(
            None if asked is None else max(1, asked // settings.context),
            settings.trainer.validate_every,
            settings.samples_per_step,
            most=max(1, MOST_VALIDATION_TOKENS // settings.context),
        ),
        validation_batch=settings.trainer.validation_micro_batch,
        num_workers=(2 if hardware.kind == "cuda" else 0) if workers is None else workers,
        cache_dir=settings.data.cache_dir,
    )
