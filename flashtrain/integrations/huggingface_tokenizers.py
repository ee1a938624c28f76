"""A tokenizer in the form that transformers' AutoTokenizer reads from an export: the same ids for the same text.

    how = save_tokenizer(tokenizer, "for_transformers", context=1024)
    # transformers.AutoTokenizer.from_pretrained("for_transformers")

One thing differs, and is meant to: where a text spells a special token ("<|endoftext|>"), transformers takes it for
that token, unless it is called with split_special_tokens=True; ours take it for text like any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as LibraryTokenizer

from flashtrain.data.bpe import END_OF_TEXT, BPETokenizer
from flashtrain.data.huggingface_tokenizer import HuggingFaceTokenizer
from flashtrain.data.tokenizer_files import CONFIG, FILE, MARK
from flashtrain.data.tokenizers import ByteTokenizer, Tokenizer
from flashtrain.data.wordpiece import SpecialTokens, WordPieceTokenizer

NAMES = {"pad": "[PAD]", "classify": "[CLS]", "separate": "[SEP]", "mask": "[MASK]"}  # of SpecialTokens
READ = "AutoTokenizer reads its tokenizer"


def save_tokenizer(
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    context: int | None = None,
    special: SpecialTokens | None = None,
    segments: bool = False,
) -> str:
    """Writes folder/tokenizer.json and tokenizer_config.json, which flashtrain's load_tokenizer reads too; returns, in
    a few words, what the export has.

    context: the longest text, in tokens, that the model takes (None: any). special: the tokens of a BERT's samples,
    which transformers then puts around a text; None: a decoder's tokenizer, which adds nothing. segments: whether the
    model takes token_type_ids.
    OSError: an unwritable folder.
    """
    folder = Path(folder)
    library = _library_form(tokenizer, special)
    if library is None:
        return "it has no tokenizer that transformers could read"
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # Without this transformers hands token_type_ids to a GPT-2 too, which would add an embedding for them.
        "model_input_names": ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
        MARK: {"kind": getattr(tokenizer, "kind", None)},
    }
    if context is not None:
        config["model_max_length"] = context
    if isinstance(tokenizer, HuggingFaceTokenizer):
        config = {**tokenizer.config, **config}
    if special is None and not isinstance(tokenizer, HuggingFaceTokenizer):
        config |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    if special is not None:
        config |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        config |= {"unk_token": "[UNK]"} if library.token_to_id("[UNK]") is not None else {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(library.to_str(), encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return READ


def _library_form(tokenizer: Tokenizer, special: SpecialTokens | None) -> LibraryTokenizer | None:
    """The Hugging Face library's tokenizer with the same ids, special tokens included; None where there is none."""
    if not isinstance(tokenizer, ByteTokenizer | BPETokenizer | WordPieceTokenizer | HuggingFaceTokenizer):
        return None
    library = tokenizer.library_form()
    if special is None:
        return library
    # Those past a tokenizer's own are added in the order of their ids; WordPiece has its own already.
    library.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in NAMES.values()])
    if any(library.token_to_id(name) != getattr(special, field) for field, name in NAMES.items()):
        return None
    if library.post_processor is None:
        library.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", special.classify), ("[SEP]", special.separate)],
        )
    return library
