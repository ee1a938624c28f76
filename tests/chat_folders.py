"""Hugging Face tokenizer folders with chat templates of the shapes that published models
have, made in a moment."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501 - lines are part of a template

MARKED = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501 - lines are part of a template

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""  # noqa: E501 - lines are part of a template

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""  # noqa: E501 - lines are part of a template

# Thoughts are shown in the answer that comes last alone.
THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED_THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}
{{- message.content if loop.last else message.content.split('</think>')[-1] }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501 - lines are part of a template

# The prompt for an answer opens a thought, which no finished answer shows.
OPENED = """\
{%- for message in messages %}{{ '[' + message.role + ']' + message.content.split('</think>')[-1] }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]<think>' }}{% endif %}"""

# As gpt-oss': the answer that comes last is written with its thought and an end of its own,
# others are not; a call is written with its thought until an answer follows it; of several calls
# the first is written.
HARMONY = """\
{%- for message in messages %}
{%- set later = namespace(answer=false) %}
{%- for other in messages[loop.index:] if other.role == 'assistant' and not other.tool_calls %}
{%- set later.answer = true %}{% endfor %}
{%- set last = loop.last and not add_generation_prompt %}
{%- if message.thinking and (message.tool_calls and not later.answer or last) %}
{{- '<|im_start|>assistant|thinks|' + message.thinking + '<|im_end|>' }}{% endif %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '<|im_start|>assistant|calls|' + call.name + ' ' + call.arguments | tojson + '[INST]' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant|says|' + message.content + ('<|eot_id|>' if last else '<|im_end|>') }}
{%- else %}{{ '<|im_start|>' + message.role + '|' + message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

# As GLM's: an answer has no end, and what follows it begins with its role's token; earlier
# thoughts are not shown.
ENDLESS = """\
{%- set asked = namespace(at=0) %}
{%- for message in messages if message.role == 'user' %}{% set asked.at = loop.index %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>\\n' }}
{%- if message.thinking and asked.at * 2 <= loop.index %}{{ '<think>' + message.thinking + '</think>' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '<call>' ~ call.function.arguments | tojson }}{% endfor %}
{%- else %}{{ {'user': '[INST]', 'tool': '[/INST]', 'system': ''}[message.role] + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>{% endif %}"""  # noqa: E501 - lines are part of a template

# As DeepSeek's: a call's arguments are text, and the content beside one is a text or null.
JOINED = """\
{%- for message in messages %}
{%- if message.role != 'assistant' %}{{ '[INST]' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined %}
{%- if message['content'] is not none %}{{ message['content'] + '' }}{% endif %}
{%- for call in message.tool_calls %}{{ '<call>' + call.function.name + call.function.arguments }}{% endfor %}
{{- eos_token }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}"""  # noqa: E501 - lines are part of a template

# It takes a content as text or as a list of parts, each on a line of its own.
LISTED = """\
{%- for message in messages %}{{ '[' + message.role + ']' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{{ message.content | map(attribute='text') | join('\\n') }}{% endif %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

# As Idefics3's: it reads a content as a list of parts, and finds nothing in a text.
PARTS = """\
{%- for message in messages %}{{ '[' + message.role + ']' }}
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

# As LLaVA's: it refuses a content that is a text.
FIRST_PART = """\
{%- for message in messages %}{{ '[' + message.role + ']' + message.content[0].text }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

# As Llama 3.1's: it writes no content beside a call. It shows nobody a system's message.
SILENT = """\
{%- for message in messages if message.role != 'system' %}{{ '[' + message.role + ']' }}
{%- if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% else %}{{ message.content | trim }}{% endif %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""  # noqa: E501 - lines are part of a template

# Its marks leave out what the assistant says.
MARKED_ENDS = """\
{%- for message in messages %}{{ '[' + message.role + ']' + message.content }}
{%- if message.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""  # noqa: E501 - lines are part of a template

# A question is written otherwise before it is answered.
ASKING = """\
{%- for message in messages %}{{ '[' + message.role + ']' + message.content }}
{%- if message.role == 'assistant' %}{{ eos_token }}
{%- elif not (loop.last and add_generation_prompt) %} (answered){% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

SPECIAL = (
    "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]",
)  # fmt: skip


def write_sums(path: Path, pairs: Iterable[tuple[int, int]]) -> Path:
    """Conversations of a question and an answer, "What is 2+3?" and "5", as a .jsonl file."""
    with path.open("w") as file:
        for a, b in pairs:
            talk = [
                {"role": "user", "content": f"What is {a}+{b}?"},
                {"role": "assistant", "content": f"{a + b}"},
            ]
            file.write(json.dumps({"messages": talk}) + "\n")
    return path


def save_tokenizer_folder(
    folder: Path,
    template: str | None = CHATML,
    *,
    words: str = "",
    begins: bool = False,
    spaced: bool = False,
) -> Path:
    """A byte-level BPE in `folder`: of bytes alone, or with merges that it learns from `words`.

    begins: it puts its begin of a text before one, as Llama's does. spaced: every text begins with
    a space, as SentencePiece has it.
    """
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([words], trainer)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", made.token_to_id("<|begin|>"))]
        )
    else:
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    library = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>"
    )
    library.chat_template = template
    library.save_pretrained(folder)
    return folder
