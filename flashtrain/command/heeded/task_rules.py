"""Who heeds the settings of single tasks: language models, BERT, classifiers, and what is made of them."""

from __future__ import annotations

from flashtrain.command.heeded.conditions import (
    CLASSES,
    LANGUAGE,
    MASKED,
    OF_A_CHECKPOINT,
    TRAININGS,
    TUNING,
    Condition,
    Rule,
    does,
    either,
    in_stages,
    measures,
    never,
    runs_the_command,
    trains,
    unless,
)
from flashtrain.settings.settings import Settings


def _no_weights(settings: Settings) -> bool:
    return settings.weights is None


def _data(*names: str) -> Condition:
    """Whether these are what a classifier reads."""
    return lambda settings: settings.sequence.data in names


def _from_files(settings: Settings) -> bool:
    """Whether Pathfinder's images are read, not drawn."""
    return settings.sequence.data == "pathfinder" and settings.sequence.path is not None


def _labelled(*names: str) -> Condition:
    """Whether these are what is fine-tuned on."""
    return lambda settings: settings.finetune.data in names


def _words(settings: Settings) -> bool:
    return settings.finetune.target == "tokens"


def _texts(settings: Settings) -> bool:
    return settings.finetune.target != "tokens"


def _sparse(settings: Settings) -> bool:
    return any(name != "dense" for name in in_stages(settings, "pattern", settings.classifier.pattern))


def _masks_pixels(settings: Settings) -> bool:
    return any(weight != 0 for weight in in_stages(settings, "masked_weight", settings.masked_pixels.weight))


def _reads_pathfinder(settings: Settings) -> bool:
    return does(*TRAININGS, "evaluate", task=(CLASSES,))(settings) and settings.sequence.data == "pathfinder"


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
    Rule("lengths", does("lengths"), "mode=lengths (recipe=gpt2-long, long-document)"),
    Rule(
        "lengths.window lengths.scored lengths.stride lengths.windows lengths.resamples lengths.bins",
        does("lengths", task=(LANGUAGE,)),
        "mode=lengths of a language model (recipe=gpt2-long)",
    ),
    Rule("passkey", does("passkey", task=(LANGUAGE,)), "mode=passkey checkpoint=... of a language model"),
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

CLASSIFIER_RULES = (
    Rule("sequence", does(*TRAININGS, "evaluate", task=(CLASSES,)), "classifiers (recipe=pathx, path256, lra-*)"),
    Rule(
        "sequence.augment sequence.classification_weight sequence.validation_samples",
        trains(CLASSES),
        "trainings of a classifier",
    ),
    Rule(
        "sequence.path",
        _data("text", "retrieval", "image", "pathfinder"),
        "sequence.data=pathfinder, text, retrieval, image; listops is generated",
    ),
    Rule(
        "sequence.name",
        either(_data("text", "image"), _from_files),
        "sequence.data=text, image, and Pathfinder's images from sequence.path",
    ),
    Rule(
        "sequence.seed",
        either(_data("listops", "text", "image"), _from_files),
        "sequence.data=listops, text, image; Pathfinder has pathfinder.seed",
    ),
    Rule(
        "sequence.cache_dir",
        _data("listops", "text", "retrieval", "image"),
        "data other than Pathfinder's, which have pathfinder.cache_dir",
    ),
    Rule(
        "pathfinder",
        either(does("preview"), _reads_pathfinder),
        "classifiers of sequence.data=pathfinder, and recipe=pathfinder-preview",
    ),
    Rule(
        "pathfinder.drawing pathfinder.seed pathfinder.drawn_as pathfinder.train_images pathfinder.validation_images "
        "pathfinder.test_images pathfinder.workers pathfinder.cache_dir",
        lambda settings: not _from_files(settings),
        "images that are drawn; those of sequence.path have sequence.seed, sequence.validation and sequence.test",
    ),
    Rule("pathfinder.preview", does("preview"), "recipe=pathfinder-preview; mode=evaluate has sequence.preview"),
    Rule(
        "pathfinder.train_images pathfinder.validation_images pathfinder.variation",
        trains(CLASSES),
        "trainings of a classifier",
    ),
    # a training keeps it for the mode=evaluate of its run
    Rule("pathfinder.test_images", does(*TRAININGS, "evaluate"), "mode=evaluate of a classifier"),
    Rule(
        "classifier masked_pixels curriculum",
        trains(CLASSES),
        "trainings of a classifier (recipe=pathx, path256, lra-*)",
    ),
    Rule(
        "classifier.pattern_block classifier.pattern_local classifier.pattern_globals",
        _sparse,
        "classifier.pattern other than dense",
    ),
    Rule("masked_pixels.share masked_pixels.copies", _masks_pixels, "masked_pixels.weight above 0"),
)

TASK_RULES = (*LANGUAGE_RULES, *BERT_RULES, *CLASSIFIER_RULES)
