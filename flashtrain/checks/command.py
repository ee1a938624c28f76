"""mode=check: the check of the model that a command names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch

from flashtrain.announce import say
from flashtrain.checks.check import check
from flashtrain.checks.questions import FAULT, NONE
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_shrinking import VOCABULARY, shrunk
from flashtrain.settings.options import Mask
from flashtrain.settings.settings import Settings
from flashtrain.tasks.attention_masks import make_mask
from flashtrain.tasks.decoders import make_model
from flashtrain.tasks.language.evaluate import read_model
from flashtrain.tasks.language.task import LanguageModel
from flashtrain.training.hardware import Hardware

OF_DOCUMENTS = "documents apart", "packed equals alone"
SHORT = {"window": 20, "chunk": 32, "prefix": 50}  # which the checked row exceeds


def run_check(settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """Check the model that the settings name, print the table, and return it and the status."""
    mask = settings.applied_mask
    if not mask.documents:
        say("the check packs documents, as data.document_mask=true does in a training")
    plain = mask.name in ("causal", "document")
    short = {name: min(most, x) for name, most in SHORT.items() if (x := getattr(mask, name))}
    checked = replace(mask, documents=True, **short)
    if short:
        say(f"the check shortens the mask: {checked.label}, in place of {mask.label}")
    own = None if plain else make_mask(checked)
    model = LanguageModel(_model(settings, hardware), document_mask=True, mask=own)
    if settings.model.name == "huggingface":
        say("checked as recipe=hf computes it; as transformers does alone: flashtrain.check(model)")
    count = sum(one.numel() for one in model.parameters())
    say(f"checking {settings.model.label}, {count / 1e6:,.1f}M parameters; large ones take minutes")
    half = hardware.kind == "cuda" and hardware.precision == "bf16-mixed"
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        report = check(model, ranks=2)
    if mask.name not in get_args(Mask) and not mask.documents:  # it need not keep them apart
        words = f"mask={mask.name} does not keep documents apart, as mask.documents=true needs"
        for at, row in enumerate(report):
            if row.verdict == FAULT and row.check in OF_DOCUMENTS:
                report[at] = row._replace(verdict=NONE, words=words)
    unasked = sum(row.verdict == NONE for row in report)
    words = f"; {unasked} questions could not be asked" * (unasked > 0)
    say(f"{report}\n{len(report.faults) or 'no'} faults found{words}")
    return {"report": report, "status": int(bool(report.faults))}


def _model(settings: Settings, hardware: Hardware) -> Any:
    """Return the model: with its weights on a GPU, of a run, or where one of flashtrain's is given;
    else of random weights, and a decoder of transformers in small."""
    theirs, attention = settings.model.name == "huggingface", hardware.attention
    given = settings.checkpoint or settings.weights or settings.model.path
    whole = settings.checkpoint is not None or hardware.kind == "cuda" or not theirs
    if given is not None and whole:
        return read_model(settings, hardware).model
    vocabulary = 1 if theirs else VOCABULARY
    model: Any = make_model(
        settings.model, vocab_size=vocabulary, context=settings.context, attention=attention
    )
    if not theirs:
        return model
    say("checked in small: a layer of each kind, random weights")
    return HuggingFaceDecoder(shrunk(model.module))
