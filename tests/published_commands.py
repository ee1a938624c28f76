"""Every command that the pages and the result files tell a reader to type: the words after
`python -m flashtrain`."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a user reads first, and page by page; then what the guide leads to.
GUIDE = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
)
PAGES = (
    *GUIDE,
    "recipes/README.md",
    "recipes/results/README.md",
    "kernels/README.md",
    "kernels/dev/OPTIMISATION.md",
)
_START = re.compile(r"(?:python3?|torchrun\s[^\n`|]*?)\s+-m flashtrain(?=[ \n`]|$)")


def python_blocks() -> dict[str, str]:
    """The Python code of the guide, by the marker comment above it (`<!-- MARKER -->`)."""
    found: dict[str, str] = {}
    for page in GUIDE:
        text = (ROOT / page).read_text(encoding="utf-8")
        marked = re.findall(r"<!-- ([^>]+?) -->\n```python\n(.*?)```", text, flags=re.DOTALL)
        assert len(marked) == text.count("```python"), (
            f"{page} has Python without a marker above it"
        )
        assert not found.keys() & dict(marked).keys(), f"{page} repeats a marker"
        found.update(marked)
    return found


def shell_blocks() -> dict[str, list[str]]:
    """The shell lines of the guide by page, without comments, and with continued lines as one."""
    found: dict[str, list[str]] = {}
    for page in GUIDE:
        text = (ROOT / page).read_text(encoding="utf-8")
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE
        ):
            if language not in ("", "bash"):
                continue
            lines = [
                re.sub(r"(^|\s+)# .*", "", line).strip()
                for line in block.replace("\\\n", " ").splitlines()
            ]
            found.setdefault(page, []).extend(line for line in lines if line)
    return found


def published_commands() -> list[str]:
    """Sorted, each once; what a page leaves open in brackets (`[a | b]`) is told in every way."""
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES if (ROOT / page).is_file()]
    for path in sorted((ROOT / "recipes" / "results").glob("*.json")):
        texts.append(str(json.loads(path.read_text(encoding="utf-8")).get("command", "")))
    found = {words for text in texts for command in _commands(text) for words in _choices(command)}
    return sorted(found)


def _commands(text: str) -> list[str]:
    """What stands behind each `python -m flashtrain` of a text, to where the command ends."""
    found = []
    text = re.sub(r" *\\\n\s*", " ", text)  # a command may go on in the next line
    for start in _START.finditer(text):
        rest = text[start.end() :].splitlines()[0] if text[start.end() :] else ""
        rest = re.split(r"`|;| # | {2,}#|, where | \(|  ", rest)[0]
        found.append(rest.strip().rstrip(",.: "))
    return [command for command in found if not command.endswith("=")]  # "recipe=..." names none


def _choices(command: str) -> list[str]:
    """The command with each `[a | b]` as a, and as b; a lone `[a]` of settings
    given and left out."""
    parts = re.split(r"(\[[^\[\]]*(?:\|| )[^\[\]]*\]|(?<= )\[[a-z_.]+=[^|]*?\]+(?= |$))", command)
    ways: list[list[str]] = []
    for part in parts:
        if re.match(r"\[[a-z]", part) and "=" in part:
            inside = part[1:-1].split(" | ")
            ways.append([*inside, ""] if len(inside) == 1 else inside)
        else:
            ways.append([part])
    made = (" ".join("".join(way).split()) for way in itertools.product(*ways))
    return [one.replace("ddp|fsdp", "fsdp").replace("=$d", "=144") for one in made]


def words_of(command: str) -> list[str]:
    """The settings of a published command; words that are none (-m, prose, a
    shell's) are left out."""
    told = command.split(", at half ")[0].replace(", ...]", "]").replace("...", "etc")
    return [word for word in shlex.split(told) if re.match(r"[+~]*[a-z_.]+=", word)]


RUN_OF = {
    "language_model": "gpt2",
    "classification": "pathx",
    "masked_language_model": "bert",
    "fine_tuning": "bert-finetune",
}


def saved_runs(folder: Path) -> dict[str, Path]:
    """Made in `folder`: a run folder of each task and one of conversations ("chat"), with a
    checkpoint that is only there to be found; a transformers folder without weights ("model"); and
    a folder of recipes ("mine")."""
    import transformers
    from chat_folders import save_tokenizer_folder

    from flashtrain.command.compose import compose_settings
    from flashtrain.folders.run_folder import write_config

    found = {name: folder / name for name in ("model", "mine", "chat", *RUN_OF)}
    for one in found.values():
        one.mkdir()
    save_tokenizer_folder(found["model"])
    transformers.LlamaConfig().save_pretrained(found["model"])
    shutil.copy(ROOT / "recipes" / "gpt2.yaml", found["mine"] / "mine.yaml")
    words = {task: [f"recipe={recipe}"] for task, recipe in RUN_OF.items()}
    words["chat"] = ["recipe=sft", f"model.path={found['model']}", "data.path=chats.jsonl"]
    for task, given in words.items():
        write_config(asdict(compose_settings(given)), found[task])
        (found[task] / "checkpoints").mkdir()
        (found[task] / "checkpoints" / "best.ckpt").touch()
    return found


def jobs_of(command: str, runs: dict[str, Path]) -> list[list[str]]:
    """The words of each job of a published command; with checkpoint=RUN those of a run of each task
    that has the mode. runs: saved_runs."""
    from flashtrain.command import sweep
    from flashtrain.settings.command_line import CommandLine

    words = words_of(command)
    published = "weights=recipes/results/pathx-original-h200.safetensors"
    words = [published if "FILE.safe" in word else word for word in words]
    of_models = ("evaluate", "generate", "ruler", "positions", "check")
    if {f"mode={mode}" for mode in of_models} & set(words):
        words = [
            f"model.path={runs['model']}" if word.startswith("model.path=") else word
            for word in words
        ]
    words = [
        f"resume={runs['language_model']}" if word == "resume=runs/gpt2/" else word
        for word in words
    ]
    if not any(word.startswith("checkpoint=") for word in words):
        return sweep.expand(CommandLine(words)) if command.startswith("-m") else [words]
    kept = [word for word in words if not word.startswith("checkpoint=")]
    tasks = list(RUN_OF)
    if "runs/sft" in command:
        tasks = ["chat"]
    elif "gpt2" in command or not {"mode=evaluate", "mode=export"} & set(words):
        tasks = ["language_model"]
    if any(word.startswith(("pathfinder.", "sequence.")) for word in words):
        tasks = ["classification"]
    return [[*kept, f"checkpoint={runs[task]}"] for task in tasks]
