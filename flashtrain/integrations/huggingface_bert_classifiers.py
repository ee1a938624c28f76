"""Saving fine-tuned BERT classifiers in Hugging Face transformers' format
(safetensors and config.json).

save_bert_classifier(model, "for_transformers", ("no", "yes"))
# BertForSequenceClassification.from_pretrained("for_transformers"), or BertForTokenClassification
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashtrain.errors import UserError
from flashtrain.integrations.huggingface_bert import (
    PREFIX,
    bert_content,
    bert_tensors,
    differences_from_bert,
)
from flashtrain.integrations.weight_files import write_folder
from flashtrain.models.bert_classifiers import SequenceClassifier, TokenClassifier


def save_bert_classifier(
    model: SequenceClassifier | TokenClassifier,
    folder: str | Path,
    label_names: Sequence[str],
    *,
    pad_token: int = 0,
) -> str:
    """Save a classifier as model.safetensors and config.json for transformers.

    Args:
        label_names: The names of the labels, in the order of the model's outputs.
        pad_token: The id of the padding token, for config.json.

    Returns:
        The name of the class that loads the folder, BertForSequenceClassification or
        BertForTokenClassification.

    Raises:
        UserError: transformers' class cannot represent the model.
        OSError: The folder cannot be written.
    """
    config, pooling = model.encoder.config, getattr(model, "pooling", "first")
    differences = [
        *differences_from_bert(config),
        *([f"pooling={pooling}"] if pooling != "first" else []),
    ]
    if differences:
        raise UserError(
            f"transformers' BERT cannot represent a classifier with {', '.join(differences)}: "
            "expected the family bert with pooling=first, or with a label for each word."
        )
    name = "BertForSequenceClassification"
    if isinstance(model, TokenClassifier):
        name = "BertForTokenClassification"
    content = bert_content(config, name, pad_token, model.classifier.weight.dtype)
    content["id2label"] = {str(number): name for number, name in enumerate(label_names)}
    content["label2id"] = {name: number for number, name in enumerate(label_names)}
    content["classifier_dropout"] = model.dropout.p
    if isinstance(model, SequenceClassifier):
        content["problem_type"] = (
            "multi_label_classification" if model.multi_label else "single_label_classification"
        )
    write_folder(folder, content, bert_tensors(model.state_dict(), config, prefix=PREFIX))
    return name
