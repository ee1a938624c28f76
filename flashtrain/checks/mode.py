"""mode=check: its entry point for a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashtrain.announce import say
from flashtrain.errors import UserError
from flashtrain.mode import Mode
from flashtrain.settings.settings import Settings

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware

VOCABULARY = 256


class Check(Mode):
    """mode=check: whether a model's documents see each other, and what it declares is felt."""

    of_checkpoint = of_weights = of_recipe = True
    example = (
        "mode=check model.path=MODEL",
        "do documents see each other? windows, sinks, ranks; exit status 1 if so",
    )

    def uses(self, settings: Settings) -> tuple[str, ...]:
        return ("checkpoint", "weights", "attention", "context", "data", "mask", "model")

    def check(self, settings: Settings) -> None:
        if settings.task != "language_model":
            raise UserError(
                f"mode=check with recipe={settings.recipe}, task={settings.task}: expected a "
                "language model. Other models: flashtrain.check(model, batch)."
            )

    def run_checkpoint(self, settings: Settings, hardware: Hardware) -> dict[str, Any]:
        from flashtrain.checks.check import check
        from flashtrain.tasks.attention_masks import make_mask

        model, words = _model(settings, hardware)
        say(f"checking {words}, on the {hardware.kind} ...")
        mask = settings.applied_mask
        if not mask.documents:
            say(
                "documents are packed as by data.document_mask=true; it is false in these settings, "
                "with which a training lets documents of a row see each other"
            )
        report = check(model, mask=make_mask(replace(mask, documents=True)), ranks=2)
        say(str(report))
        faults = len(report.faults)
        say(f"{faults} of {len(report.rows)} checks found a fault" if faults else "no fault found")
        return {"report": report, "status": int(faults > 0)}


def _model(settings: Settings, hardware: Hardware) -> tuple[Any, str]:
    """Return the model and what it is: on a GPU with its weights, else a small one of
    transformers' classes, and a run's as it is."""
    from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
    from flashtrain.integrations.huggingface_shrinking import shrunk
    from flashtrain.tasks.decoders import make_model
    from flashtrain.tasks.language.evaluate import read_model

    given = settings.checkpoint or settings.weights or settings.model.path
    huggingface = settings.model.name == "huggingface"
    if given is not None and (hardware.kind == "cuda" or not huggingface):
        return read_model(settings, hardware).model, f"{given} whole"
    model = make_model(
        settings.model,
        vocab_size=1 if huggingface else VOCABULARY,
        context=settings.context,
        attention=hardware.attention,
    )
    if not isinstance(model, HuggingFaceDecoder):
        return model, f"{settings.model.label} with random weights"
    small = HuggingFaceDecoder(shrunk(model.module))
    number = len(small.blocks)
    return small, f"{number} of {len(model.blocks)} layers, one of each kind, with random weights"
