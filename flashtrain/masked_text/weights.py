"""A trained BERT and its tokenizer, back from a run, an export of ours, or Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain.data.special_tokens import SpecialTokens
from flashtrain.data.tokenizers import CONFIG_NAME, Tokenizer, load_tokenizer
from flashtrain.data.wordpiece import WordPieceTokenizer
from flashtrain.errors import UserError
from flashtrain.integrations import exported_by_flashtrain, load_bert, load_weights
from flashtrain.models.bert_config import BertConfig
from flashtrain.run_folder import BEST, CONFIG_FILE, TOKENIZER, find_checkpoint
from flashtrain.training.checkpoints import read_checkpoint, weights_in


@dataclass
class SavedBert:
    """config and state rebuild the model (models.Bert). tokenizer: None where nothing beside the weights says it.

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
        """The tokenizer. UserError: there is none."""
        if self.tokenizer is None:
            raise UserError(
                f"no tokenizer beside the weights in {self.folder}. Possible: a run folder, what mode=export wrote, or "
                "a Hugging Face folder with vocab.txt or tokenizer.json."
            )
        return self.tokenizer


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """[PAD], [CLS], [SEP] and [MASK]: a WordPiece tokenizer's own, or four past the others'."""
    if isinstance(tokenizer, WordPieceTokenizer):
        return tokenizer.special
    return SpecialTokens.past(tokenizer.vocab_size)


def read_bert(given: str | Path) -> SavedBert:
    """The BERT that `given` names: a run folder or checkpoint (its best weights), an export of ours, or a Hugging Face
    folder or safetensors file with config.json beside. UserError: anything else."""
    path = Path(given).expanduser()
    if path.suffix == ".ckpt" or (path / CONFIG_FILE).is_file():
        return _of_run(str(given))
    folder = path if path.is_dir() else path.parent
    if exported_by_flashtrain(path):
        config, state = load_weights(path, "bert")
    else:
        config, state = load_bert(path)
    return SavedBert(config, state, _tokenizer_beside(folder), folder, path)


def _of_run(given: str) -> SavedBert:
    folder, path = find_checkpoint(given, prefer=BEST)
    saved = read_checkpoint(path)
    notes = saved.get("flashtrain")
    shape = notes.get("shape") if isinstance(notes, dict) and notes.get("name") == "bert" else None
    if not isinstance(shape, dict):
        raise UserError(f"{path} holds no BERT: it was not written by a run with task=masked_language_model.")
    state = weights_in(saved, path, prefix="model.")
    return SavedBert(
        _config(shape, path), state, load_tokenizer(folder / TOKENIZER), folder, path, int(saved.get("global_step", 0))
    )


def _tokenizer_beside(folder: Path) -> Tokenizer | None:
    if (folder / TOKENIZER / CONFIG_NAME).is_file():
        return load_tokenizer(folder / TOKENIZER)
    return WordPieceTokenizer.beside(folder)


def _config(shape: dict[str, Any], path: Path) -> BertConfig:
    if not shape.keys() <= {field.name for field in fields(BertConfig)}:
        raise UserError(f"{path} does not say the shape of its BERT, or one that this version does not know.")
    return BertConfig(**shape)
