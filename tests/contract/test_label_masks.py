"""Which tokens of a conversation are learnt, by chat templates of nine published
shapes, as literal text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_folders import CHATML, HARMONY, LLAMA3, MARKED, MISTRAL, THINKING, save_tokenizer_folder
from transformers import AutoTokenizer

from flashtrain.data.chat_datamodule import ChatDataModule

GEMMA = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""  # noqa: E501 - lines are part of a template

PHI = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|stop|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""  # noqa: E501 - lines are part of a template

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

TURNS = ["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|stop|>"]

TALK = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is 4."},
]
THOUGHT = [{**one, "thinking": "hm"} if one["role"] == "assistant" else one for one in TALK]

# Template, conversation, and the documents that it becomes; what is learnt stands between « and ».
EXPECTED: dict[str, tuple[str, list[dict[str, str]], list[str]]] = {
    "chatml": (
        CHATML,
        TALK,
        [
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n«Hi there<|im_end|>\n»"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n«It is 4.<|im_end|>\n»"
        ],
    ),
    "generation marks": (
        MARKED,
        TALK,
        [
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n«Hi there<|im_end|>»"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n«It is 4.<|im_end|>»"
        ],
    ),
    "llama 3": (
        LLAMA3,
        TALK,
        [
            "<|begin|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«Hi there<|eot_id|>»"
            "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 4.<|eot_id|>»"
        ],
    ),
    "mistral": (
        MISTRAL,
        TALK,
        ["<|begin|>[INST] Hello [/INST]« Hi there<|end|>»[INST] 2+2? [/INST]« It is 4.<|end|>»"],
    ),
    "gemma": (
        GEMMA,
        TALK,
        [
            "<|begin|><start_of_turn>user\n"
            "Hello<end_of_turn>\n"
            "<start_of_turn>model\n"
            "«Hi there<end_of_turn>\n"
            "»<start_of_turn>user\n"
            "2+2?<end_of_turn>\n"
            "<start_of_turn>model\n"
            "«It is 4.<end_of_turn>\n"
            "»"
        ],
    ),
    "phi": (
        PHI,
        TALK,
        [
            "<|user|>\nHello<|stop|>\n<|assistant|>\n«Hi there<|stop|>\n»"
            "<|user|>\n2+2?<|stop|>\n<|assistant|>\n«It is 4.<|stop|>\n<|end|>»"
        ],
    ),
    "zephyr": (
        ZEPHYR,
        TALK,
        [
            "<|user|>\nHello<|end|>\n<|assistant|>\n«Hi there<|end|>\n»"
            "<|user|>\n2+2?<|end|>\n<|assistant|>\n«It is 4.<|end|>\n»"
        ],
    ),
    "qwen, thinking": (
        THINKING,
        [
            {**one, "content": f"<think>hm</think>{one['content']}"} if "thinking" in one else one
            for one in THOUGHT
        ],
        [
            (
                "<|im_start|>user\n"
                "Hello<|im_end|>\n"
                "<|im_start|>assistant\n"
                "«<think>hm</think>Hi there<|im_end|>\n"
                "»"
            ),
            "<|im_start|>user\n"
            "Hello<|im_end|>\n"
            "<|im_start|>assistant\n"
            "Hi there<|im_end|>\n"
            "<|im_start|>user\n"
            "2+2?<|im_end|>\n"
            "<|im_start|>assistant\n"
            "«<think>hm</think>It is 4.<|im_end|>\n"
            "»",
        ],
    ),
    "gpt-oss, thinking": (
        HARMONY,
        THOUGHT,
        [
            "<|im_start|>user|Hello<|im_end|>"
            "<|im_start|>assistant«|thinks|hm<|im_end|><|im_start|>assistant|says|Hi "
            "there<|eot_id|>»",
            "<|im_start|>user|Hello<|im_end|><|im_start|>assistant|says|Hi there<|im_end|>"
            "<|im_start|>user|2+2?<|im_end|>"
            "<|im_start|>assistant«|thinks|hm<|im_end|><|im_start|>assistant|says|It is "
            "4.<|eot_id|>»",
        ],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_the_assistant_says_is_learnt_and_nothing_else(name: str, tmp_path: Path) -> None:
    template, talk, documents = EXPECTED[name]
    words = "Hello there\n\nuser assistant It is 4.\n" * 9
    folder = save_tokenizer_folder(tmp_path / "tokenizer", template, words=words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": TURNS})
    tokenizer.save_pretrained(folder)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    data = ChatDataModule(
        tmp_path / "chats.jsonl",
        folder,
        context=256,
        total_steps=1,
        validation_fraction=0,
        cache_dir=tmp_path / "cache",
    )
    data.setup()
    (batch,) = data.train_dataloader()
    assert set(shown(batch, tokenizer)) == set(documents)


def shown(batch: dict[str, torch.Tensor], tokenizer) -> list[str]:
    """Each document of the only row as text, its learnt tokens between « and »."""
    tokens, labels, numbers = (
        batch[name][0].tolist() for name in ("tokens", "labels", "documents")
    )
    texts: list[str] = []
    for number in sorted(set(numbers))[:-1]:  # the last one fills the row up
        text, learning = "", False
        for place in (at for at, one in enumerate(numbers) if one == number):
            learnt = place > 0 and labels[place - 1] >= 0
            assert not learnt or labels[place - 1] == tokens[place]
            text += ("«" if learnt else "»") * (learnt != learning) + tokenizer.decode(
                [tokens[place]]
            )
            learning = learnt
        texts.append(text + "»" * learning)
    return texts
