"""Who heeds the settings of single tasks: language models, BERT, classifiers, and what is made of them."""

from __future__ import annotations

from flashtrain.command.heeded.conditions import (
    LANGUAGE,
    MASKED,
    OF_A_CHECKPOINT,
    TRAININGS,
    TUNING,
    Condition,
    Rule,
    does,
    either,
    measures,
    never,
    runs_the_command,
    trains,
    unless,
)
from flashtrain.settings.settings import Settings


def _no_weights(settings: Settings) -> bool:
    return settings.weights is None


def _labelled(*names: str) -> Condition:
    """Whether these are what is fine-tuned on."""
    return lambda settings: settings.finetune.data in names


def _words(settings: Settings) -> bool:
    return settings.finetune.target == "tokens"


def _texts(settings: Settings) -> bool:
    return settings.finetune.target != "tokens"


_measures_bert = measures("bert")

LANGUAGE_RULES = (
    Rule(
        "model",
        either(does(*TRAININGS, *OF_A_CHECKPOINT, task=(LANGUAGE,)), measures("step")),
        "language models; BERT has bert.*, a classifier classifier.*",
    ),
    Rule(
        "model.name model.size model.positions model.dropout model.vocab_rows model.options",
        either(trains(LANGUAGE), measures("step")),
        "trainings; a checkpoint's model is as it was trained",
    ),
    Rule(
        "model.size model.positions",
        unless(measures("step"), _no_weights),
        "trainings without weights=, which have a size and positions of their own",
    ),
    Rule(
        "model.size",
        unless(lambda settings: settings.benchmark.name is None, runs_the_command),
        "trainings; here it is benchmark.models=[124m,355m]",
    ),
    Rule(
        "data",
        either(does(*TRAININGS, *OF_A_CHECKPOINT, task=(LANGUAGE, MASKED, TUNING)), measures("step", "bert")),
        "language models and BERT; a classifier has sequence.*",
    ),
    Rule(
        "data.path data.config data.split data.text_column data.streaming data.include_tests",
        lambda settings: settings.task != TUNING,
        "trainings on plain text; labelled texts are finetune.data, finetune.path and finetune.name",
    ),
    Rule(
        "data.document_mask data.validation_tokens data.split_context",
        lambda settings: settings.task == LANGUAGE,
        "language models; BERT has masked.* and finetune.*",
    ),
    Rule(
        "prompt generate",
        either(trains(LANGUAGE), does("generate"), runs_the_command),
        "mode=generate and the sample at the end of a language model's training",
    ),
)

BERT_RULES = (
    Rule(
        "bert",
        either(does(*TRAININGS, "evaluate", task=(MASKED, TUNING)), _measures_bert),
        "recipe=bert, bert-lamb, bert-speed, finetune, long-document",
    ),
    Rule("bert.size", trains(MASKED, TUNING), "trainings of BERT; recipe=bert-speed has benchmark.models"),
    Rule("bert.dropout", trains(MASKED, TUNING), "trainings of BERT; recipe=bert-speed has benchmark.dropouts"),
    Rule("bert.vocab_rows", trains(MASKED, TUNING), "trainings of BERT"),
    Rule(
        "bert.family bert.activation",
        either(trains(MASKED, TUNING), _measures_bert),
        "trainings of BERT and recipe=bert-speed; a checkpoint's model is as it was trained",
    ),
    Rule(
        "bert.size bert.family bert.activation bert.vocab_rows",
        _no_weights,
        "trainings without weights=, which have a shape of their own",
    ),
    Rule(
        "masked",
        either(does(*TRAININGS, "evaluate", task=(MASKED,)), _measures_bert),
        "recipe=bert, bert-lamb, bert-speed",
    ),
    Rule("masked.unit", unless(does(*TRAININGS, "evaluate"), never), "trainings; here it is benchmark.units"),
    Rule("masked.layout", unless(does(*TRAININGS, "evaluate"), never), "trainings; here benchmark.implementations is"),
    Rule("finetune", does(*TRAININGS, "evaluate", task=(TUNING,)), "recipe=finetune, long-document"),
    Rule(
        "finetune.length finetune.shortest finetune.labels finetune.presence",
        _labelled("cues"),
        "made-up documents (finetune.data=cues)",
    ),
    Rule(
        "finetune.text_column finetune.words_column finetune.labels_column finetune.validation_fraction",
        _labelled("files", "hub"),
        "finetune.data=files, hub",
    ),
    Rule("finetune.config", _labelled("hub"), "finetune.data=hub"),
    Rule("finetune.words_column", _words, "finetune.target=tokens"),
    Rule("finetune.text_column finetune.pooling", _texts, "finetune.target=labels, class"),
)

TASK_RULES = (*LANGUAGE_RULES, *BERT_RULES)
