"""Saving a tokenizer for transformers' AutoTokenizer, with the same ids for the same text.

    how = save_tokenizer(tokenizer, "for_transformers", context=1024)
    # transformers.AutoTokenizer.from_pretrained("for_transformers")

One difference is intended: where a text spells a special token ("<|endoftext|>"), ours read it as
ordinary text, while transformers reads it as the token unless it is called with
split_special_tokens=True.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Library

from flashtrain.data.library_tokenizer import CONFIG, FILE, MARK, LibraryTokenizer
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.data.wordpiece import SpecialTokens

# Of SpecialTokens.
NAMES = {"pad": "[PAD]", "classify": "[CLS]", "separate": "[SEP]", "mask": "[MASK]"}
ROLES = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
READ, NONE = "AutoTokenizer reads its tokenizer", "it has no tokenizer that transformers could read"


def save_tokenizer(
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    context: int | None = None,
    special: SpecialTokens | None = None,
    segments: bool = False,
) -> str:
    """Save tokenizer.json and tokenizer_config.json, which flashtrain's load_tokenizer reads too.

    Args:
        tokenizer: A tokenizer of flashtrain.
        folder: The folder to write to, created where it is missing.
        context: The model's longest text in tokens (None: not limited).
        special: A BERT's special tokens, which transformers then puts around a text (None:
            a decoder's tokenizer).
        segments: Whether the model takes token_type_ids.

    Returns:
        A sentence that says whether AutoTokenizer can read the result.

    Raises:
        OSError: The folder cannot be written.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        return NONE
    library = tokenizer.library_form()
    if special is not None and not _takes(library, special):
        return NONE
    config: dict[str, Any] = {**tokenizer.config, **({} if special is None else ROLES)}
    if special is not None and library.token_to_id("[UNK]") is not None:
        config["unk_token"] = "[UNK]"
    # Without this entry transformers passes token_type_ids to a GPT-2 too, which would add
    # an embedding for them.
    config["model_input_names"] = [
        "input_ids",
        *(["token_type_ids"] if segments else []),
        "attention_mask",
    ]
    config[MARK] = {"kind": tokenizer.kind}
    if context is not None:
        config["model_max_length"] = context
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(library.to_str(), encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return READ


def _takes(library: Library, special: SpecialTokens) -> bool:
    """Add a BERT's four special tokens to the library's tokenizer; return whether they then have
    the ids of `special`."""
    # New tokens are added in the order of their ids; WordPiece has them already.
    library.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in NAMES.values()]
    )
    if library.post_processor is None:
        library.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", special.classify), ("[SEP]", special.separate)],
        )
    return all(
        library.token_to_id(name) == getattr(special, field) for field, name in NAMES.items()
    )
