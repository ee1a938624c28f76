"""The guide tried as a reader would, without a GPU: the commands of a page from top to
bottom, in one folder.

Each runs as it stands, with the reader's own things in the place of FOLDER, RUN and the like, and
with words that make it small: steps, samples and tokens are few. None may end in a traceback or
another status than 0, or say a line twice.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from as_a_reader import succeeds
from published_commands import ROOT, shell_blocks

pytestmark = pytest.mark.slow

TRAINING = {
    "trainer.steps": "2",
    "trainer.validate_every": "2",
    "trainer.checkpoint_every": "1",
    "trainer.tokens_per_step": "2048",
    "data.validation_tokens": "512",
    "generate.max_new_tokens": "4",
    "data": "files",
    "data.path": "novels",
    "data.validation_fraction": "0.2",
}
TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}\n{% endfor %}"
FINE_TUNING = {"trainer.steps": "2", "finetune.batch": "2", "context": "32"}
RESUMED = itertools.count(1)
PAGES = (
    "README.md",
    "docs/start/quickstart.md",
    "docs/train/your-text.md",
    "docs/train/runs.md",
    "docs/train/from-weights.md",
    "docs/train/longer-context.md",
    "docs/train/memory.md",
    "docs/train/several-gpus.md",
    "docs/extend/add-a-mask.md",
    "docs/train/hugging-face.md",
    "docs/train/check.md",
    "docs/train/conversations.md",
)
RULER = "ruler.lengths=[700] ruler.samples=1 ruler.tasks=[niah_single_1,fwe]"
# Of a page's numbers those that a CPU needs minutes for -> what is tried in their place.
NUMBERS = {
    "context=1024,2048,4096,8192,16384": "context=32,64",
    "context=1048576": "context=64",
    "trainer.tokens_per_step=1048576": "trainer.tokens_per_step=128",
    "context=16384": "context=256",
    "context=131072": "context=64",
    "trainer.tokens_per_step=131072": "trainer.tokens_per_step=256",
    "context=65536": "context=64",
    "context=8192": "context=2048",
    "context=4096": "context=256",
    "trainer.tokens_per_step=65536": "trainer.tokens_per_step=2048",
    **dict.fromkeys(
        (
            "ruler.lengths=[4096,16384]",
            "ruler.lengths=[4096,8192,16384]",
            "ruler.lengths=[1024] ruler.tasks=[niah_single_1]",
        ),
        f"{RULER} model.interpolate_positions=true",
    ),
    **dict.fromkeys(("ruler.lengths=[4096,8192]", "ruler.lengths=[65536,131072]"), RULER),
    "positions.length=16384": "positions.length=64",
    "positions.length=8192": "positions.length=64",
    "lengths.contexts=[1024,4096]": "lengths.contexts=[64,256] lengths.window=256",
    "model.size=1.5b": "model.size=demo",
    "trainer.devices=8": "trainer.devices=2",
    "context_parallel=8": "context_parallel=2",
    "context_parallel=4": "context_parallel=2",
    "hardware.plan_for=8xh100": "hardware.plan_for=2xh100",
    "pathfinder.test_images=5000": "pathfinder.test_images=1",
}


def newest(folder: str) -> str:
    """The run that a page's `runs/NAME/...` stands for."""
    return str(
        max(
            (path for path in Path(folder).iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
        )
    )


def adapted(line: str, own: dict[str, str]) -> tuple[dict[str, str], list[str]] | None:
    """(environment, the words of flashtrain) of a page's line; None for a line that
    is none of its commands."""
    found = re.fullmatch(r"((?:\w+=\S+ )*)(?:python|torchrun .*?) -m flashtrain(?: (.*))?", line)
    if found is None:
        return None
    text = found[2] or ""
    for told, tried in NUMBERS.items():
        text = re.sub(rf"(?<![^ ]){re.escape(told)}(?![^ ])", tried, text)
    for told, mine in own.items():
        text = text.replace(told, mine)
    text = re.sub(r"=(runs/[\w-]+)/\.\.\.", lambda run: f"={newest(run[1])}", text)
    text = re.sub(r"/step-\d+\.ckpt", "/step-1.ckpt", text)
    words = shlex.split(text)
    if "recipe=extend" in words and "mode=plan" not in words:
        words.append("mode=plan")  # it starts seven commands; tests/recipes/test_extend.py does
    keys = {word.split("=", 1)[0] for word in words}
    if not keys & {"mode", "checkpoint"}:
        small = {
            name: value
            for name, value in TRAINING.items()
            if "recipe=sft" not in words or name[:4] != "data"
        }
        small = FINE_TUNING if "recipe=bert-finetune" in words else small
        keys |= {"data.path"} & small.keys() if "data" in keys else set()
        keys |= {"trainer.steps"} if "trainer.epochs" in keys else set()
        words += [f"{key}={value}" for key, value in small.items() if key not in keys]
        if "recipe=sft" in words and "context" not in keys:
            words.append("context=64")
        if "recipe=gpt2-long" in words and "lengths.contexts" not in keys:
            words += ["lengths.contexts=[64,256]", "lengths.window=256"]
        if "resume" in keys:  # further each time
            words[words.index("trainer.steps=2")] = f"trainer.steps={2 + 2 * next(RESUMED)}"
    elif "mode=generate" in words:
        words.append("generate.max_new_tokens=4")
    environment = dict(word.split("=", 1) for word in found[1].split())
    return {name: value.replace("~", str(Path.cwd())) for name, value in environment.items()}, words


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader has texts in a folder, a recipe, and a GPT-2 that somebody
    saved with transformers."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from flashtrain.data.tokenizers import ByteTokenizer

    (tmp_path / "recipes").symlink_to(ROOT / "recipes")  # a clone's
    (tmp_path / "novels").mkdir()
    for number in range(12):
        line = f"Chapter {number} says that the quick brown fox jumps over the lazy dog. "
        (tmp_path / "novels" / f"{number}.txt").write_text(line * 60)
    config = GPT2Config(vocab_size=257, n_positions=1024, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "somebodys-gpt2")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    llama = LlamaConfig(
        **sizes, vocab_size=257, max_position_embeddings=256, bos_token_id=256, eos_token_id=256
    )
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "somebodys-llama")
    based = LlamaForCausalLM.from_pretrained(tmp_path / "somebodys-llama")
    adapter = get_peft_model(based, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapter.save_pretrained(tmp_path / "somebodys-adapter")
    (tmp_path / "somebodys-llama" / "tokenizer.json").write_text(
        ByteTokenizer().library_form().to_str()
    )
    kind = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (tmp_path / "somebodys-llama" / "tokenizer_config.json").write_text(json.dumps(kind))
    spoken = [{"role": role, "content": f"{role} speaks"} for role in ("user", "assistant")]
    for name in ("chats", "more", "others"):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"messages": spoken}) for _ in range(60))
        )
    (tmp_path / "talk.json").write_text(json.dumps(spoken[:1]))
    (tmp_path / "numbers").mkdir()
    (np.arange(5000, dtype=np.uint16) % 65).tofile(tmp_path / "numbers" / "all.bin")
    np.save(tmp_path / "tokens.npy", np.arange(5000, dtype=np.uint16) % 65)
    (tmp_path / "reviews").mkdir()
    reviews = [
        json.dumps({"text": f"review {number}", "labels": ["good" if number % 2 else "bad"]})
        for number in range(40)
    ]
    (tmp_path / "reviews" / "train.jsonl").write_text("\n".join(reviews))
    (tmp_path / "my-recipes").mkdir()
    (tmp_path / "my-recipes" / "mine.yaml").write_text(
        "# mine\ncontext: 32\nmodel:\n  size: demo\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n"))  # what is typed to prompt=-
    return tmp_path


@pytest.mark.longest
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_one_after_the_other(page: str, home: Path) -> None:
    own = {
        "finetune.path=FOLDER": "finetune.path=reviews",
        "weights=RUN_OR_HUGGING_FACE_FOLDER": "weights=runs/bert/...",
        "data=tokens data.path=FOLDER": "data=tokens data.path=numbers",
        "ADAPTER_FOLDER": "somebodys-adapter",
        "FOLDER": "novels",
        "context:65536,steps:100": "context:512,steps:2",
        "context:131072,steps:50": "context:1024,steps:1",
        "OTHER_CODE": "novels",
        "CODE": "novels",
        "OTHERS": "novels",
        "data.path=TEXT": "data.path=novels",
        "trainer.epochs=1": "trainer.steps=2",
        "BOOKS": "novels",
        "GPT2_novels": "somebodys-gpt2",
        "context-16384": "context-256",
        "checkpoint=RUN": "checkpoint=runs/gpt2/...",
        "weights=RUN ": "weights=runs/gpt2/... ",
        "novels_OR_HUB_NAME": "somebodys-llama",
        "model.path=MODEL": "model.path=somebodys-llama",
        "CONFIG_JSON": "somebodys-llama/config.json",
        "data.tokenizer=gpt2": "data.tokenizer=bytes",
    }
    # It begins where a reader has trained a BERT and a GPT-2.
    if page == "docs/train/from-weights.md":
        small = [
            "bert.size=tiny",
            "context=32",
            "trainer.steps=2",
            "masked.token_budget=256",
            "data.tokenizer=bytes",
        ]
        small.append("trainer.tokens_per_step=2048")
        succeeds(["recipe=bert", "data=files", "data.path=novels", *small])
        succeeds(adapted("python -m flashtrain recipe=gpt2", own)[1])
    done = []
    for typed in shell_blocks()[page]:
        command = adapted(typed, own)
        if command is None or command in done:  # torchrun's words may be those of a line above it
            continue
        done.append(command)
        environment, words = command
        staged = any(word.startswith(("stages=", "recipe=extend")) for word in words)
        several = "-m" in words or "recipe=gpt2-long" in words or staged
        succeeds(words, environment, several=several)
