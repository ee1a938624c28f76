"""The text that a language model writes after a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashtrain.announce import say
from flashtrain.data.tokenizers import Tokenizer, as_prompt, begin_of
from flashtrain.errors import UserError
from flashtrain.files.json_files import parse_json, read_json
from flashtrain.models.generation import generate
from flashtrain.models.trainable import Trainable
from flashtrain.settings.settings import Settings
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.tasks.language.ends import generation_ends


def continue_text(model: Trainable, tokenizer: Tokenizer, settings: Settings) -> str:
    """Return the prompt with what the model writes after it; for a conversation the
    answer alone, as plain text.

    If the run was trained on conversations (data=chat), a prompt in plain text is a conversation's
    first message.

    Raises:
        UserError: the model cannot generate text, or the prompt's file holds no conversation.
    """
    device = next(model.parameters()).device
    prompt, options = settings.prompt or settings.data.first_words, settings.generate
    row, template = conversation_of(prompt), None
    if row is None and settings.data.source == "chat":
        row = {"messages": [{"role": "user", "content": prompt}]}
    if row is not None:
        from flashtrain.data.chat_template import ChatTemplate

        template = ChatTemplate(tokenizer)
    elif settings.checkpoint is None and getattr(tokenizer, "config", {}).get("chat_template"):
        say(
            "the prompt is continued as plain text; with recipe=sft it is a user's message, "
            "by the chat template."
        )
    begin = (
        as_prompt(tokenizer, prompt) if template is None or row is None else template.prompt(row)
    )
    with torch.autocast(
        "cuda",
        dtype=torch.bfloat16,
        enabled=device.type == "cuda" and torch.cuda.is_bf16_supported(),
    ):
        written = generate(
            model,
            [begin],
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=settings.seed,
            end_of_text=generation_ends(model, tokenizer, chat=template is not None),
            mask=make_mask(settings.applied_mask, packed=False),
            context=settings.context,
        )[0]
    if template is not None:
        return template.tokenizer.decode(written[len(begin) :], special=False)
    return tokenizer.decode(written[len(begin_of(tokenizer)) :])


def conversation_of(prompt: str) -> dict[str, Any] | None:
    """Return the conversation that a prompt holds: a dict with "messages" and perhaps "tools";
    None for a plain text.

    Args:
        prompt: the path of a .json file, or JSON: a conversation, or its list of messages.
    """
    named = prompt.endswith(".json") and (" " not in prompt or Path(prompt).expanduser().is_file())
    try:
        given = read_json(Path(prompt).expanduser()) if named else parse_json(prompt, "prompt")
    except UserError:
        if named:
            raise
        return None
    row = (
        {"messages": given} if isinstance(given, list) else given if isinstance(given, dict) else {}
    )
    messages = row.get("messages")
    spoken = isinstance(messages, list) and any(
        isinstance(one, dict) and "role" in one for one in messages
    )
    return row if named or spoken else None
