"""mode=passkey checkpoint=...: passkey retrieval with a trained model, a table by length and depth."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2
from flashtrain.report.pivot import View
from flashtrain.report.rows import RESULT, Row, write_result
from flashtrain.run.checkpoint_model import load_trained, move
from flashtrain.run.run_folder import make_unique
from flashtrain.run.summary import model_name
from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.long_context.evaluate import autocast_dtype
from flashtrain_recipes.long_context.passkey import greedy, passkey_rows


def evaluate_passkey(settings: Settings, hardware: Hardware) -> list[Row]:
    """Ask, print the table, write RUN/passkey/result.json, and return the rows.

    A length past the trained context needs rotary positions, or model.interpolate_positions=true.
    Raises UserError otherwise, and for a model that is no decoder of ours.
    """
    asked = settings.passkey
    lengths = list(asked.lengths) if asked.lengths is not None else [settings.context]
    longest = replace(settings, context=max(settings.context, *lengths))
    trained = load_trained(str(settings.checkpoint), attention=hardware.attention, settings=longest)
    model = move(trained.model, hardware.kind, hardware.precision)
    if not isinstance(model, GPT2):
        raise UserError(f"{type(model).__name__} cannot write an answer: only flashtrain's decoders can.")
    dtype = autocast_dtype(hardware.precision)

    def answer(prompts: Tensor, count: int) -> Tensor:
        with torch.autocast(hardware.kind, dtype=dtype, enabled=dtype is not None):
            return greedy(model, prompts.to(hardware.kind), count).cpu()

    found = passkey_rows(
        answer,
        trained.tokenizer,
        lengths=lengths,
        depths=asked.depths,
        trials=asked.trials,
        digits=asked.digits,
        seed=settings.seed,
    )
    told = {"model": model_name(settings), "context": settings.context, "step": trained.step}
    rows = [{**told, **row} for row in found]
    say(f"passkey retrieval, share of {asked.trials} keys found: {trained.checkpoint} (step {trained.step})")
    shown = [{**row, "depth": f"depth {row['depth']:.0%}"} for row in rows]
    View(["length"], pivot="depth", value="accuracy").table(shown).print()
    folder = make_unique(trained.folder, "passkey")
    write_result(folder / RESULT, settings.recipe, _command(settings, lengths), rows)
    say(f"rows: {folder / RESULT}")
    return rows


def _command(settings: Settings, lengths: list[int]) -> str:
    asked = settings.passkey
    depths = ",".join(f"{depth:g}" for depth in asked.depths)
    return (
        f"python -m flashtrain mode=passkey checkpoint={settings.checkpoint} "
        f"passkey.lengths=[{','.join(map(str, lengths))}] passkey.depths=[{depths}] "
        f"passkey.trials={asked.trials} passkey.digits={asked.digits} seed={settings.seed}"
    )
