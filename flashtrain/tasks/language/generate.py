"""The text that a language model writes after a prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    prompt = settings.prompt or settings.data.first_words
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
    written = _written(model, tokenizer, settings, begin, chat=template is not None)
    if template is not None:
        return template.tokenizer.decode(written[len(begin) :], special=False)
    return tokenizer.decode(written[len(begin_of(tokenizer)) :])


def converse(model: Trainable, tokenizer: Tokenizer, settings: Settings) -> None:
    """Read a user's messages, a line each, and print what the model answers to each while it is
    written; an empty line or the input's end ends the conversation."""
    from flashtrain.data.chat_template import ChatTemplate

    template, messages = ChatTemplate(tokenizer), list[dict[str, str]]()
    say("Type a message; an empty line ends the conversation.")
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            break
        messages.append({"role": "user", "content": line.strip()})
        begin, new, shown = template.prompt({"messages": messages}), list[int](), ""

        def show(_: int, token: int) -> None:
            nonlocal shown
            new.append(token)  # noqa: B023 - used up within this round
            text = template.tokenizer.decode(new, special=False)  # noqa: B023
            if not text.endswith("\ufffd"):  # a letter may take several tokens
                print(text[len(shown) :], end="", flush=True)
                shown = text

        _written(model, tokenizer, settings, begin, chat=True, stream=show)
        answer = template.tokenizer.decode(new, special=False)
        print(answer[len(shown) :], flush=True)
        messages.append({"role": "assistant", "content": answer})


def _written(
    model: Trainable,
    tokenizer: Tokenizer,
    settings: Settings,
    begin: list[int],
    *,
    chat: bool,
    stream: Callable[[int, int], None] | None = None,
) -> list[int]:
    """Return these tokens with those that the model writes after them."""
    device, options = next(model.parameters()).device, settings.generate
    with torch.autocast(
        "cuda",
        dtype=torch.bfloat16,
        enabled=device.type == "cuda" and torch.cuda.is_bf16_supported(),
    ):
        return generate(
            model,
            [begin],
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=settings.seed,
            end_of_text=generation_ends(model, tokenizer, chat=chat),
            mask=make_mask(settings.applied_mask, packed=False),
            context=settings.context,
            stream=stream,
        )[0]


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
