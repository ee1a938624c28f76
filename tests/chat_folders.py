"""Hugging Face tokenizer folders with chat templates of the shapes that published models have, made in a moment."""

from __future__ import annotations

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
{% endif %}"""

MARKED = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""

# Thoughts are shown in the answer that comes last alone.
THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The prompt for an answer opens a thought, which no finished answer shows.
OPENED = """\
{%- for message in messages %}{{ '[' + message.role + ']' + message.content.split('</think>')[-1] }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]<think>' }}{% endif %}"""

# What ends without a prompt for an answer is closed.
CLOSED = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + ':' + message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% else %}{{ eos_token }}{% endif %}"""

SPECIAL = (
    "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]",
)  # fmt: skip


def save_tokenizer_folder(
    folder: Path, template: str | None = CHATML, *, words: str = "", begins: bool = False, spaced: bool = False
) -> Path:
    """A byte-level BPE in `folder`: of bytes alone, or with merges that it learns from `words`.

    begins: it puts its begin of a text before one, as Llama's does. spaced: every text begins with a space, as
    SentencePiece has it.
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
    library = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|begin|>", eos_token="<|end|>")
    library.chat_template = template
    library.save_pretrained(folder)
    return folder
