"""Where what a language model writes is over: the ids that end a generation."""

from __future__ import annotations

from flashtrain.data.tokenizers import Tokenizer, known_end
from flashtrain.models.trainable import Trainable


def generation_ends(model: Trainable, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """The tokenizer's end of a text, the ids of the generation_config.json that the model came with, and, of a
    conversation (chat), what ends a turn."""
    ends = [known_end(tokenizer), *model.end_ids, *turn_ends(tokenizer, chat=chat)]
    known = tokenizer.vocab_size if model.shape is None else model.shape.vocab_size
    return [end for end in dict.fromkeys(ends) if end is not None and 0 <= end < known]


def turn_ends(tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """The ids after which an answer is over, by the chat template; none where there are no conversations."""
    if not chat:
        return []
    from flashtrain.data.chat_template import ChatTemplate

    return ChatTemplate(tokenizer).end_ids
