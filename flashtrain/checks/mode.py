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
        "do documents of a row see each other? windows, ranks",
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
        from flashtrain.tasks.language.task import LanguageModel

        mask = settings.applied_mask
        if not mask.documents:
            say("documents are packed as with data.document_mask=true, which these settings lack")
        own = (
            None
            if mask.name in ("causal", "document")
            else make_mask(replace(mask, documents=True))
        )
        model = LanguageModel(_model(settings, hardware), document_mask=True, mask=own)
        report = check(model, ranks=2)
        say(f"{report}\n{len(report.faults) or 'no'} faults found")
        return {"report": report, "status": int(bool(report.faults))}


def _model(settings: Settings, hardware: Hardware) -> Any:
    """Return the model: on a GPU, or one of flashtrain's that is given, with its weights; else of
    random weights, and a decoder of transformers in small."""
    from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
    from flashtrain.integrations.huggingface_shrinking import shrunk
    from flashtrain.tasks.decoders import make_model
    from flashtrain.tasks.language.evaluate import read_model

    theirs, attention = settings.model.name == "huggingface", hardware.attention
    given = settings.checkpoint or settings.weights or settings.model.path
    if given is not None and (hardware.kind == "cuda" or not theirs):
        return read_model(settings, hardware).model
    vocabulary = 1 if theirs else VOCABULARY
    model: Any = make_model(
        settings.model, vocab_size=vocabulary, context=settings.context, attention=attention
    )
    return HuggingFaceDecoder(shrunk(model.module)) if theirs else model
