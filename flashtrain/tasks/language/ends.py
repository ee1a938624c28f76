"""Where what a language model writes is over: the ids that end a generation."""

from __future__ import annotations

from flashtrain.data.tokenizers import Tokenizer, known_end
from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings


def generation_ends(model: Trainable, tokenizer: Tokenizer, settings: Settings) -> list[int]:
    """The tokenizer's end of a text, the ids of the generation_config.json that the model came with, and, where
    conversations are its data, what ends a turn."""
    ends = [known_end(tokenizer), *model.end_ids, *turn_ends(tokenizer, settings)]
    known = tokenizer.vocab_size if model.shape is None else model.shape.vocab_size
    return [end for end in dict.fromkeys(ends) if end is not None and 0 <= end < known]


def turn_ends(tokenizer: Tokenizer, settings: Settings) -> list[int]:
    """The ids after which an answer is over, by the chat template; none where no conversations are the data."""
    if settings.data.source != "chat":
        return []
    from flashtrain.data.chat_template import ChatTemplate

    return ChatTemplate(tokenizer).end_ids
