"""A trained BERT, read back from a run, an export or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from flashtrain.data.tokenizers import Tokenizer, holds_tokenizer, load_tokenizer
from flashtrain.data.wordpiece import SpecialTokens, WordPieceTokenizer
from flashtrain.errors import UserError
from flashtrain.folders.run_folder import BEST, CONFIG_FILE, TOKENIZER, find_checkpoint
from flashtrain.integrations import load_bert, save_tokenizer
from flashtrain.models.bert import Bert
from flashtrain.models.bert_config import BertConfig
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.training.checkpoints import read_checkpoint, weights_in


def read_bert(given: str | Path, settings: Settings, attention: str = "sdpa") -> TrainedModel:
    """Read a BERT, on the CPU in evaluation mode.

    Args:
        given: a run folder or a checkpoint in one (its best weights), an export of flashtrain's, or
            a Hugging Face folder or .safetensors file with config.json next to it.
        settings: saved in the result.

    Returns:
        The model (models.Bert); its tokenizer is None if there is none next to the weights.

    Raises:
        UserError: there is no BERT.
    """
    path, step, tokenizer = Path(given).expanduser(), 0, None
    if path.suffix == ".ckpt" or (path / CONFIG_FILE).is_file():
        folder, path = find_checkpoint(str(given), prefer=BEST)
        saved = read_checkpoint(path)
        notes, step = saved["flashtrain"], saved["global_step"]
        if notes["name"] != "bert":
            raise UserError(
                f"{path} holds no BERT. Expected a run with task=masked_language_model."
            )
        config, state = BertConfig(**notes["shape"]), weights_in(saved, path)
        tokenizer = load_tokenizer(folder / TOKENIZER)
    else:
        folder = path if path.is_dir() else path.parent
        config, state = load_bert(path)
        tokenizer = (
            load_tokenizer(folder) if holds_tokenizer(folder) else WordPieceTokenizer.load(folder)
        )
    # A head that is drawn later is drawn alike without these weights.
    with torch.random.fork_rng(devices=[]):
        model = Bert(config, attention)
    model.load_state_dict(state)
    return TrainedModel(model.eval(), tokenizer, settings, folder, path, step)


def check_context(config: BertConfig, context: int, where: str) -> None:
    """Raise UserError if `context` is longer than the learned positions of the
    weights in `where`."""
    if config.positions == "learned" and context > config.context:
        raise UserError(
            f"context={context} is longer than the {config.context} positions that the weights in "
            f"{where} were trained with. Use context={config.context} or less."
        )


def tokenizer_of(trained: TrainedModel) -> Tokenizer:
    """Return the tokenizer of a BERT.

    Raises:
        UserError: there is none, or its vocabulary is larger than that of the weights.
    """
    tokenizer, known = trained.tokenizer, trained.model.config.vocab_size
    if tokenizer is None:
        raise UserError(
            f"no tokenizer next to the weights in {trained.folder}. Expected a run folder, "
            "an export, or a Hugging Face folder with vocab.txt or tokenizer.json."
        )
    tokens = special_tokens(tokenizer).vocab_size
    if tokens > known:  # the embedding table has no rows for those beyond
        raise UserError(
            f"{trained.folder}: its tokenizer makes {tokens:,} tokens, and its weights know "
            f"{known:,}. Expected the tokenizer that they were trained with."
        )
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the ids of [PAD], [CLS], [SEP] and [MASK]: a WordPiece tokenizer's own, else
    four after the vocabulary."""
    if isinstance(tokenizer, WordPieceTokenizer):
        return tokenizer.special
    return SpecialTokens.past(tokenizer.vocab_size)


def save_encoder_tokenizer(tokenizer: Tokenizer, folder: Path, config: BertConfig) -> str:
    """Write an encoder's tokenizer into its export in `folder`; return what
    was written, as text."""
    context = config.context if config.positions == "learned" else None
    special = special_tokens(tokenizer)
    return save_tokenizer(
        tokenizer, folder, context=context, special=special, segments=config.segments > 0
    )
