"""The token ids that end a generated text."""

from __future__ import annotations

from flashtrain.data.tokenizers import Tokenizer, known_end
from flashtrain.models.trainable import Trainable


def generation_ends(model: Trainable, tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """Return the token ids that end a generated text.

    They are the tokenizer's end of text, those in the generation_config.json that the model came
    with and, in a conversation (`chat`), those that end an answer.
    """
    ends = [known_end(tokenizer), *model.end_ids, *turn_ends(tokenizer, chat=chat)]
    known = tokenizer.vocab_size if model.shape is None else model.shape.vocab_size
    return [end for end in dict.fromkeys(ends) if end is not None and 0 <= end < known]


def turn_ends(tokenizer: Tokenizer, *, chat: bool) -> list[int]:
    """Return the token ids that end an answer in the tokenizer's chat
    template; [] unless `chat`."""
    if not chat:
        return []
    from flashtrain.data.chat_template import ChatTemplate

    return ChatTemplate(tokenizer).answers.end_ids
