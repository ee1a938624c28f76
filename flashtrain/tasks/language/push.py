"""A language model's export on the Hugging Face hub, with a card that says what it was made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from flashtrain.announce import say
from flashtrain.errors import UserError, first_line
from flashtrain.folders.run_folder import read_summary, settings_at
from flashtrain.spec import TrainedModel, losses_words
from flashtrain.version import __version__

CARD = "README.md"


def make_repository(name: str) -> str:
    """Make a private repository on the hub unless it exists, and return its name with its owner;
    UserError without a token, and where the hub refuses."""
    from huggingface_hub import HfApi, get_token

    if re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name) is None:
        raise UserError(
            f"export.push={name} is no repository of the hub. Expected OWNER/NAME, or NAME; "
            "without export.push the export is in the run's folder alone."
        )
    if get_token() is None:
        raise UserError(
            f"export.push={name} needs a token of the hub: `hf auth login`, or HF_TOKEN."
        )
    with _refusals(name):
        return HfApi().create_repo(name, private=True, exist_ok=True).repo_id


def push(folder: Path, name: str, trained: TrainedModel) -> None:
    """Write the model card of an export, and upload its folder."""
    from huggingface_hub import HfApi

    (folder / CARD).write_text(card(name, trained), encoding="utf-8")
    repository = make_repository(name)
    with _refusals(name):
        place = HfApi().upload_folder(repo_id=repository, folder_path=folder)
    say(f"pushed to {place}. Its card has no licence: add the one that model and data allow.")


def card(name: str, trained: TrainedModel) -> str:
    """Return a model card: base model, data, tokens, context, losses and command of the run.
    Folders of this machine are named without their place."""
    row = read_summary(trained.folder)
    settings = settings_at(trained.folder, trained.checkpoint)
    model, data = settings.model, settings.data
    base = model.path or settings.weights
    local = base is not None and Path(base).expanduser().exists()
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["flashtrain"]}
    head |= {} if base is None or local else {"base_model": base}
    head |= {"datasets": [data.name]} if data.name else {}
    shown = "none: random weights" if base is None else Path(base).name if local else base
    text = data.name or (Path(data.path).name if data.path else data.source)
    words = re.sub(r"=(['\"]?)/[^='\"]*/", r"=\1", row.get("overrides", ""))
    lines = {
        "base model": shown,
        "adapter": model.adapter and f"{model.adapter} of rank {model.adapter_rank}, merged",
        "data": f"{text} ({data.source})",
        "step": f"{trained.step:,}",
        "tokens": f"{trained.step * settings.trainer.tokens_per_step:,}",
        "context": f"{settings.context:,}",
        "loss": losses_words(row).removeprefix(": ") if "train_loss" in row else None,
        "command": f"`python -m flashtrain {words}`",
        "flashtrain": __version__,
    }
    table = "".join(f"| {one} | {value} |\n" for one, value in lines.items() if value)
    title = name.rpartition("/")[2]
    return f"---\n{yaml.safe_dump(head)}---\n\n# {title}\n\n| | |\n| :--- | :--- |\n{table}"


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn what the hub's library raises into a UserError."""
    try:
        yield
    except Exception as error:  # each client of HTTP has its own
        raise UserError(f"export.push={name}: the hub reports: {first_line(error)}") from error
