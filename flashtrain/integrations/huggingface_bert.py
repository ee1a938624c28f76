"""Loading and saving BERT in Hugging Face transformers' formats (safetensors and config.json).

    config, state_dict = load_bert("path/to/bert-base-uncased")
    model = Bert(config)
    model.load_state_dict(state_dict)
    save_bert(model, "for_transformers")    # BertForPreTraining.from_pretrained("for_transformers")

Three formats are read: BertForPreTraining (masked head, pooler, next-sentence head),
BertForMaskedLM (masked head) and BertModel (encoder, with or without its pooler); of a fine-tuned
classifier its BertModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.integrations.own_weights import own_config, save_weights
from flashtrain.integrations.weight_files import (
    Part,
    check_architecture,
    converted,
    read_folder,
    write_folder,
)
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BERT_EPSILON, BertConfig
from flashtrain.models.block import round_up

# Before the encoder's and the pooler's names in a model with heads; absent in a bare BertModel.
PREFIX = "bert."
NAMES = {
    "encoder.token_embedding": "embeddings.word_embeddings",
    "encoder.position_embedding": "embeddings.position_embeddings",
    "encoder.segment_embedding": "embeddings.token_type_embeddings",
    "encoder.embedding_norm": "embeddings.LayerNorm",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
    "pooler.dense": "pooler.dense",
    "masked_head.dense": "cls.predictions.transform.dense",
    "masked_head.norm": "cls.predictions.transform.LayerNorm",
    "masked_head": "cls.predictions",
    "next_sentence": "cls.seq_relationship",
    "classifier": "classifier",  # of a head that was fine-tuned
}
OUTSIDE = ("cls.", "classifier.")  # tensors that are not the BertModel's
# One matrix here, in this order.
PROJECTIONS = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
# May have more rows than tokens.
WITH_VOCABULARY = ("encoder.token_embedding.weight", "masked_head.bias")
# Checkpoints published in 2018 have these names for a norm's weights;
# transformers still reads them.
OLD_ENDINGS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
# Accepted values of config.json's entries, the first where an entry is left out.
COMPUTATION: dict[str, tuple[Any, ...]] = {
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


def load_bert(folder_or_file: str | Path) -> tuple[BertConfig, dict[str, Tensor]]:
    """Load the configuration and state dict of a Bert from transformers' weights or from
    those of save_weights.

    The configuration has the file's heads. Tensors are on the CPU in the file's dtype. For
    transformers' weights config.dropout is 0 whatever the file has, and the embedding table has a
    multiple of 64 rows, the added ones zero.

    Args:
        folder_or_file: A folder, or a safetensors file next to its config.json.

    Raises:
        UserError: There are no weights, or they are of another architecture, or Bert
            cannot compute the same.
    """
    content, tensors = read_folder(folder_or_file)
    own = own_config(content, "bert", folder_or_file)
    if own is not None:
        return own, tensors
    tensors = _bare(tensors)
    config = _our_config(content, tensors, folder_or_file)
    make, tensors = partial(Bert, config, attention="sdpa"), _without_tied(tensors, folder_or_file)
    return config, converted(tensors, make, partial(_their_parts, config=config), folder_or_file)


def save_bert(model: Bert, folder: str | Path, *, pad_token: int = 0) -> str:
    """Save a Bert for transformers with the heads that it has; the modern family in
    flashtrain's own format.

    Args:
        pad_token: The id of the padding token, for config.json.

    Returns:
        The name of the format, in words.

    Raises:
        OSError: The folder cannot be written.
    """
    config = model.config
    kinds = {(True, True, True): "BertForPreTraining", (True, False, False): "BertForMaskedLM"}
    kinds |= {(False, pooler, False): "BertModel" for pooler in (True, False)}
    architecture = kinds.get((config.masked_head, config.pooler, config.next_sentence))
    if architecture is None or differences_from_bert(config):
        return save_weights(model, folder)
    tensors = bert_tensors(
        model.state_dict(), config, prefix="" if architecture == "BertModel" else PREFIX
    )
    write_folder(
        folder, bert_content(config, architecture, pad_token, model.output_weight.dtype), tensors
    )
    return f"Hugging Face's BERT format: transformers.{architecture}.from_pretrained reads it"


def bert_tensors(
    state: Mapping[str, Tensor], config: BertConfig, *, prefix: str
) -> dict[str, Tensor]:
    """Return the tensors of a Bert, or of a classifier on Bert's encoder,
    under transformers' names.

    Args:
        state: The model's state dict.
        config: The encoder's configuration.
        prefix: The prefix of the encoder's and the pooler's names in the result, such as "bert.".
    """
    tensors = {}
    for name, tensor in state.items():
        if name in WITH_VOCABULARY:
            tensor = tensor[: config.vocab_size]
        names = _their_names(name)
        for theirs, part in zip(names, tensor.chunk(len(names)), strict=True):
            tensors[theirs if theirs.startswith(OUTSIDE) else prefix + theirs] = part
    return tensors


def bert_content(
    config: BertConfig, architecture: str, pad_token: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the content of transformers' config.json for a model of this configuration."""
    return {
        "architectures": [architecture],
        "model_type": "bert",
        "hidden_act": "gelu" if config.activation == "gelu_exact" else "gelu_pytorch_tanh",
        "hidden_size": config.embed,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.context,
        "type_vocab_size": config.segments,
        "vocab_size": config.vocab_size,
        "layer_norm_eps": config.epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "pad_token_id": pad_token,
        "dtype": str(dtype).removeprefix("torch."),
    }


def differences_from_bert(config: BertConfig) -> list[str]:
    """Return the properties of an encoder that transformers' BERT cannot represent,
    in words; [] if it can."""
    differences = {
        f"norm_place={config.norm_place}": config.norm_place != "post",
        f"positions={config.positions}": config.positions != "learned",
        f"activation={config.activation}": config.activation not in ACTIVATIONS.values(),
        "no segments": config.segments == 0,
        "no biases": not config.bias,
    }
    return [name for name, differs in differences.items() if differs]


def _bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under a bare BertModel's current names, without a classifier's head."""
    bare = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(PREFIX)
        for old, new in OLD_ENDINGS.items():
            name = name.replace(old, new)
        # Dropped: a constant in older files, and a fine-tuned head, which
        # further training replaces.
        if name != "embeddings.position_ids" and not name.startswith("classifier."):
            bare[name] = tensor
    return bare


def _without_tied(tensors: dict[str, Tensor], where: str | Path) -> dict[str, Tensor]:
    """Return the tensors without copies of tied ones; UserError if a copy differs, which means
    that the decoder is not tied to the embedding."""
    tied = {
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    for copy, original in tied.items():
        if (
            copy in tensors
            and original in tensors
            and not torch.equal(tensors[copy], tensors[original])
        ):
            raise UserError(
                f"{where}: '{copy}' differs from '{original}': "
                "expected a decoder tied to the embedding."
            )
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def _our_config(
    content: dict[str, Any], tensors: dict[str, Tensor], where: str | Path
) -> BertConfig:
    check_architecture(content, ("bert",), COMPUTATION, where)
    return BertConfig(
        vocab_size=content["vocab_size"],
        vocab_rows=round_up(content["vocab_size"], 64),
        context=content["max_position_embeddings"],
        layers=content["num_hidden_layers"],
        heads=content["num_attention_heads"],
        embed=content["hidden_size"],
        ffn=content.get("intermediate_size") or 4 * content["hidden_size"],
        segments=content.get("type_vocab_size", 2),
        activation=ACTIVATIONS[content.get("hidden_act", "gelu")],
        epsilon=content.get("layer_norm_eps", BERT_EPSILON),
        masked_head=any(name.startswith("cls.predictions.") for name in tensors),
        pooler=any(name.startswith("pooler.") for name in tensors),
        next_sentence=any(name.startswith("cls.seq_relationship.") for name in tensors),
    )


def _their_names(name: str) -> tuple[str, ...]:
    """Return the names in a BertModel of our parameter: one, or for the packed projection of
    queries, keys and values three, in the order of its rows."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("encoder.blocks."):
        return (f"{NAMES[module]}.{kind}",)
    layer, rest = module.removeprefix("encoder.blocks.").split(".", 1)
    theirs = PROJECTIONS if rest == "attention.qkv" else (NAMES[rest],)
    return tuple(f"encoder.layer.{layer}.{part}.{kind}" for part in theirs)


def _their_parts(name: str, rows: int, config: BertConfig) -> list[Part]:
    names = _their_names(name)
    return [
        (theirs, config.vocab_size if name in WITH_VOCABULARY else rows // len(names))
        for theirs in names
    ]
