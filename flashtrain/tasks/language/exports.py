"""A language model's export: its weights for other programs, and for
trainings that start from them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import filelock
import torch
from torch import nn

from flashtrain.announce import say
from flashtrain.data.tokenizers import known_end
from flashtrain.errors import UserError
from flashtrain.files.json_files import read_json
from flashtrain.folders.new_folder import new_folder
from flashtrain.folders.run_folder import BEST, find_checkpoint, settings_at
from flashtrain.integrations import save_decoder, save_tokenizer
from flashtrain.integrations.huggingface_config import ROTARY
from flashtrain.integrations.huggingface_folder import add_end_ids, folder_of
from flashtrain.integrations.weight_files import CONFIG
from flashtrain.models.mixer import DECAYS
from flashtrain.settings.model import NOTE
from flashtrain.settings.settings import Settings
from flashtrain.spec import TrainedModel
from flashtrain.tasks.language.ends import turn_ends
from flashtrain.tasks.language.starting_weights import is_of_run
from flashtrain.tasks.language.trained import load_trained

EXACT = "export-exact"  # an export for a following training, which takes no other


def export(trained: TrainedModel, settings: Settings, *, exact: bool = False) -> Path:
    """Write the weights as safetensors, in Hugging Face's layout if it can hold the model;
    return the new folder.

    The weights get the dtype export.dtype; if `exact`, for a training that starts from them, they
    are not rounded. The given model is changed: adapters are merged, weights rounded.
    """
    model, shape = trained.model, trained.model.shape
    context = shape.context if shape is not None and shape.positions == "learned" else None
    dtype = None if exact else settings.export.dtype or _dtype_of(getattr(model, "origin", None))
    with new_folder(trained.folder, EXACT if exact else "export") as (made, folder):
        if getattr(model, "adapters", ()):
            model.merge(made)
        rounding = "" if dtype is None else _round(model, dtype)
        how = model.save(made) or save_decoder(
            model, made, end_of_text=known_end(trained.tokenizer)
        )
        add_end_ids(made, turn_ends(trained.tokenizer, chat=settings.data.source == "chat"))
        note = {**_note(trained.checkpoint), "label": settings.named(settings.model.label)}
        note[ROTARY] = getattr(getattr(model, "config", None), ROTARY, None)
        for place in (*made.glob("adapter"), made):
            tokenizer = save_tokenizer(trained.tokenizer, place, context=context)
            (place / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
    say(f"exported step {trained.step} to {folder} ({how}; {tokenizer}){rounding}")
    return folder


def _dtype_of(origin: str | None) -> str | None:
    """Return the dtype that the configuration of a transformers folder states for its weights; None
    if it states none."""
    content = {} if origin is None else read_json(folder_of(origin) / CONFIG)
    return content.get("dtype") or content.get("torch_dtype")


@torch.no_grad()
def _round(model: nn.Module, dtype: str) -> str:
    """Convert the weights to a dtype in place, but for decays of recurrences, and return a text on
    how much that rounded them; "" if nothing was rounded."""
    largest = change = norm = 0.0
    for name, one in model.named_parameters():
        if name.rpartition(".")[2] in DECAYS:
            continue
        exact, one.data = one.data, one.data.to(getattr(torch, dtype))
        off = one.data.to(exact.dtype) - exact
        largest = max(largest, off.abs().max().item())
        change, norm = math.hypot(change, off.norm().item()), math.hypot(norm, exact.norm().item())
    if not largest:
        return ""
    words = (
        f"in {dtype}, which rounds weights by at most {largest:.1e} ({change / norm:.1e} relative)"
    )
    return f"; {words}; export.dtype=float32 is exact"


def take_export(settings: Settings, *, make: bool = True) -> None:
    """Change `settings` so that model.path is the export of a run of a transformers model that
    model.path or `weights` names.

    If the run's best checkpoint has no export yet, it is exported if `make` is true; otherwise
    model.path becomes the given run. If model=huggingface and `weights` does not name a run,
    `weights` is moved to model.path.

    Raises:
        UserError: there is no checkpoint, or the run needs model=huggingface.
    """
    given = Path(settings.weights or settings.model.path or "").expanduser()
    transformers = settings.model.name == "huggingface"
    if not is_of_run(given):
        if settings.weights is not None and transformers:
            settings.model.path, settings.weights = settings.weights, None
        return
    named = "weights" if settings.weights else "model.path"
    folder, checkpoint = find_checkpoint(str(given), prefer=BEST, setting=named)
    own = settings_at(folder, checkpoint)
    if settings.weights is not None and own.model.name != "huggingface":
        return
    if not transformers:
        raise UserError(
            f"weights={given} is a run of a transformers model. Use recipe=hf or recipe=sft."
        )
    settings.weights = None
    if settings.mode == "plan":  # its shape is known without an export
        model = own.model
        settings.model.path, settings.model.config = model.path, model.config
        settings.model.options = {**model.options, **settings.model.options}
        return
    with filelock.FileLock(folder / ".export.lock"):  # ranks look at the same time
        note, made = _note(checkpoint).items(), folder.glob(f"{EXACT}*")
        same = next((one for one in made if note <= read_json(one / NOTE).items()), None)
        if same is None and make:
            same = export(load_trained(str(checkpoint), attention="sdpa"), own, exact=True)
        settings.model.path = str((same or given).absolute())


def _note(checkpoint: Path) -> dict[str, object]:
    return {"checkpoint": checkpoint.name, "written": checkpoint.stat().st_mtime_ns}
