"""What one training of BERT on masked text takes, from checked settings: model, data, task and plan; its evaluation."""

from __future__ import annotations

from typing import Any, cast

import pytorch_lightning as pl
import torch

from flashtrain.announce import say
from flashtrain.data.masked_datamodule import MaskedTextDataModule
from flashtrain.data.wordpiece import SpecialTokens
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import new_folder
from flashtrain.integrations import save_bert
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainingSetup
from flashtrain.tasks import MaskedLanguageModel
from flashtrain.tasks.batching import Batching, memory_plan, memory_words, plan_text
from flashtrain.tasks.components import make_source, vocabulary_of
from flashtrain.tasks.held_out import scored_words, why_not_held_out
from flashtrain.tasks.language.trained import move
from flashtrain.tasks.masked_language.build import (
    SavedBert,
    bert_config,
    check_context,
    check_masked_step,
    choose_masked_batching,
    describe_bert,
    make_bert,
    make_masked_data,
    make_masked_task,
    read_bert,
    save_encoder_tokenizer,
)
from flashtrain.tasks.training_task import evaluating_trainer, metric
from flashtrain.training.callbacks import StopAtTarget, describe_validation
from flashtrain.training.hardware import Hardware
from flashtrain.training.throughput import Throughput

ADVICE = "a smaller masked.token_budget=, memory=full, or trainer.devices on more GPUs"


def prepare(settings: Settings, hardware: Hardware) -> TrainingSetup:
    """BERT, its data and its task. UserError: for what the user can mend."""
    check_masked_step(settings)
    data = make_masked_data(settings, hardware)
    data.prepare_data()
    data.setup()
    model = make_bert(settings, hardware, data.vocab_size)
    batching = choose_masked_batching(settings, hardware, model, data.padding())
    data.token_budget, data.accumulate = batching.micro_batch, batching.accumulate
    model.save_memory(batching.savings)
    description = describe_bert(model, settings)
    said = [data.describe(), describe_training(settings, hardware, model, batching, data)]
    if data.held_out_samples:
        requested, every = settings.masked.validation_samples, settings.trainer.validate_every
        said.append(describe_validation(data.held_out_samples, requested, every, "masked.validation_samples"))
    task = make_masked_task(settings, hardware, model, description)
    throughput = Throughput(_flops_per_token(model.config, data), peak_flops=hardware.peak_flops)
    target = None if settings.target_accuracy is None else StopAtTarget(settings.target_accuracy)
    return TrainingSetup(
        data,
        task,
        throughput,
        batching,
        description,
        said,
        row=lambda trainer: _found(settings, trainer, task, data, throughput, target),
        tokenizer=data.tokenizer,
        advice=ADVICE,
        callbacks=[] if target is None else [target],
    )


def describe_training(
    settings: Settings,
    hardware: Hardware,
    model: Bert,
    batching: Batching,
    data: MaskedTextDataModule | None = None,
) -> str:
    """The line that says what is about to be trained, on what, in what portions."""
    masked, name = settings.masked, settings.named(settings.bert.label)
    samples = ""
    if data is not None:
        pieces = data.pieces(data.split.training)
        mean = float(pieces.lengths.mean())
        samples = f"{len(pieces.begins):,} {masked.unit}s of {mean:.0f} tokens in the mean, "
    return (
        f"{name}: {model.parameter_count() / 1e6:.1f}M parameters, {samples}at most {settings.context}, "
        f"{masked.share:.0%} masked, {masked.layout}, attention "
        f"{hardware.attention}; {settings.trainer.steps} steps of {settings.trainer.tokens_per_step:,} tokens on "
        f"{settings.trainer.ranks} x {hardware.name}, {hardware.precision}, micro-batch {batching.micro_batch:,} tokens"
        f"{memory_words(batching)}"
    )


def _flops_per_token(config: BertConfig, data: MaskedTextDataModule) -> float:
    """FLOPs of a real token's forward and backward, the mean over the text."""
    pairs, sequences, labels = data.means()
    at = 10**9  # tokens: enough for whole numbers of the others
    return config.flops_of(at, round(pairs * at), round(sequences * at), round(labels * at)) / at


def _found(
    settings: Settings,
    trainer: pl.Trainer,
    task: MaskedLanguageModel,
    data: MaskedTextDataModule,
    throughput: Throughput,
    target: StopAtTarget | None,
) -> dict[str, Any]:
    """The part of the row that the training reports. Losses in nats a label; tokens are real ones."""
    if task.tokens_done:
        throughput.flops_per_token = task.flops_done / task.tokens_done
    measured = throughput.columns()
    rate, tokens = measured["tokens_per_second"], task.tokens_done * settings.trainer.ranks
    rows = None if rate is None else rate * task.sequences_done / task.tokens_done
    return {
        "token_budget": data.token_budget,
        "parameters": task.bert.parameter_count(),
        "steps": trainer.global_step,
        "tokens": tokens,
        "samples": task.sequences_done * settings.trainer.ranks,
        "epochs": round(data.epochs_seen, 3),
        "train_loss_first": task.first_loss,
        "train_loss": task.last_loss,
        "validation_loss": metric(trainer, "validation_loss"),
        "validation_accuracy": metric(trainer, "validation_accuracy"),
        "target_accuracy": settings.target_accuracy,
        "seconds_to_target": None if target is None or target.seconds is None else round(target.seconds, 1),
        "rows_per_second": rows,
        "fill": round(tokens / max(1, trainer.global_step * settings.trainer.tokens_per_step), 4),
        **measured,
    }


def plan_masked(settings: Settings, hardware: Hardware) -> str:
    """Parameters, tokens and time of the run, as lines to print. Builds no weights, reads no text."""
    check_masked_step(settings)
    ordinary = vocabulary_of(settings.data)
    with torch.device("meta"):
        if settings.weights is None:
            config = bert_config(settings, SpecialTokens.past(ordinary).vocab_size)
        else:
            config = read_bert(settings.weights).config
        model = Bert(config, hardware.attention, settings.bert.residual)
    batching = choose_masked_batching(settings, hardware, model)
    tokens = settings.trainer.steps * settings.trainer.tokens_per_step
    flops = tokens * (config.cost_per_token(settings.masked.share) + config.cost_per_pair() * settings.context)
    lines = [
        describe_training(settings, hardware, model, batching),
        f"text: {make_source(settings).describe()}; tokenizer {settings.data.tokenizer}",
        f"tokens: at most {tokens:,} ({settings.trainer.steps} steps of {settings.trainer.tokens_per_step:,})",
        *memory_plan(batching),
    ]
    meant = f", as if all samples had {settings.context} tokens"
    return plan_text(lines, settings, hardware, flops, at_most=True, meant=meant)


def run_masked_mode(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Evaluate or export."""
    saved = read_bert(str(settings.checkpoint))
    return _export(saved) if settings.mode == "export" else _evaluate(saved, settings, hardware)


def _evaluate(saved: SavedBert, settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Loss and masked-language accuracy on the held-out samples."""
    check_context(saved.config, settings.context, str(saved.path))
    data = make_masked_data(settings, hardware)
    data.accumulate = 1  # the Trainer below takes no steps
    data.setup()
    if data.vocab_size != saved.config.vocab_size:
        raise UserError(
            f"{saved.path} knows {saved.config.vocab_size} tokens, and this text is made of {data.vocab_size}. "
            "Use the tokenizer that it was trained with."
        )
    model = trained_bert(saved, settings, hardware)
    trainer = evaluating_trainer(hardware)
    (found,) = trainer.validate(MaskedLanguageModel(model), data, verbose=False) or [{}]
    if "validation_accuracy" not in found:
        raise UserError("no text is held out to evaluate on. Raise data.validation_fraction.")
    counts, why_not = {"samples": data.held_out_samples}, why_not_held_out(settings, saved.folder)
    words = scored_words(counts, data.source.describe(), why_not)
    claim = "held-out " if why_not is None else ""
    say(
        f"{saved.path} (step {saved.step}): {claim}loss {found['validation_loss']:.4f}, masked-language accuracy "
        f"{found['validation_accuracy']:.2%}, {words}"
    )
    measures = {name: found[name] for name in ("validation_loss", "validation_accuracy")}
    return {**measures, "held_out": why_not is None, **counts}


def trained_bert(saved: SavedBert, settings: Settings, hardware: Hardware) -> Bert:
    """The saved model on the machine, in evaluation mode."""
    model = Bert(saved.config, hardware.attention, settings.bert.residual)
    model.load_state_dict(saved.state)
    return cast(Bert, move(model.eval(), hardware.kind, hardware.precision))


def _export(saved: SavedBert) -> dict[str, Any]:
    """Write the weights as safetensors: in Hugging Face's layout where the model is a BERT of theirs, else in ours."""
    model = Bert(saved.config, "sdpa")
    model.load_state_dict(saved.state)
    with new_folder(saved.folder, "export") as folder:
        how = save_bert(model, folder, pad_token=saved.special.pad)
        tokenizer = save_encoder_tokenizer(saved.needed_tokenizer(), folder, saved.config)
    say(f"exported step {saved.step} to {folder} ({how}; {tokenizer})")
    return {"folder": folder}
