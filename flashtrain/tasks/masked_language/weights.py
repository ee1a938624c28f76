"""A trained BERT and its tokenizer, back from a run, an export of ours, or Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flashtrain.data.tokenizers import SpecialTokens, Tokenizer, WordPieceTokenizer, holds_tokenizer, load_tokenizer
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, CONFIG_FILE, TOKENIZER, find_checkpoint
from flashtrain.integrations import exported_by_flashtrain, load_bert, load_weights, save_tokenizer
from flashtrain.integrations.weight_files import check_vocabulary, check_weights, described_config, trained_steps
from flashtrain.models.bert import Bert
from flashtrain.models.bert_encoder import BertConfig
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
        """The tokenizer. UserError: there is none, or one of more tokens than the weights know."""
        if self.tokenizer is None:
            raise UserError(
                f"no tokenizer beside the weights in {self.folder}. Possible: a run folder, what mode=export wrote, or "
                "a Hugging Face folder with vocab.txt or tokenizer.json."
            )
        check_vocabulary(special_tokens(self.tokenizer).vocab_size, self.config.vocab_size, self.folder)
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
    config = described_config(BertConfig, shape, state, str(path))
    check_weights(lambda: Bert(config, "sdpa"), state, str(path))
    return SavedBert(config, state, load_tokenizer(folder / TOKENIZER), folder, path, trained_steps(saved, path))


def _tokenizer_beside(folder: Path) -> Tokenizer | None:
    """An export's, or a Hugging Face folder's."""
    return load_tokenizer(folder) if holds_tokenizer(folder) else WordPieceTokenizer.beside(folder)
