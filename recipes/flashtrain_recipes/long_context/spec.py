"""mode=lengths, a training for each of several contexts, and mode=passkey, as a run asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrain.errors import UserError
from flashtrain.settings.settings import Settings, check_context
from flashtrain.spec import Mode

if TYPE_CHECKING:
    from flashtrain.training.hardware import Hardware


class Lengths(Mode):
    """A language model trained at each context (recipe=gpt2-long), or BERT fine-tuned (recipe=long-document)."""

    study = True

    def contexts(self, settings: Settings) -> list[int]:
        return list(settings.lengths.contexts or ())

    def is_asked(self, settings: Settings) -> bool:
        return bool(settings.lengths.contexts)

    def check(self, settings: Settings) -> None:
        if settings.mode == "lengths" and not settings.lengths.contexts:
            raise UserError(
                f"mode=lengths trains each of lengths.contexts, which recipe={settings.recipe} does not name: "
                "add lengths.contexts=[1024,2048], or take recipe=gpt2-long."
            )
        if settings.mode == "lengths":
            check_context(settings)
            if settings.shares_sequences:
                raise UserError(
                    f"mode=lengths trains several contexts, each on whole sequences: choose trainer.strategy=ddp or "
                    f"fsdp, or train one context with {settings.asked_to_share} and mode=train."
                )

    def plan(self, settings: Settings, hardware: Hardware) -> str:
        from flashtrain_recipes.long_context.study import lengths_plan
        from flashtrain_recipes.long_document.study import contexts_plan

        return (contexts_plan if _of_texts(settings) else lengths_plan)(settings, hardware)

    def run_study(self, settings: Settings, overrides: list[str], *, started: float) -> int:
        from flashtrain_recipes.long_context.study import run_lengths
        from flashtrain_recipes.long_document.study import run_contexts

        return (run_contexts if _of_texts(settings) else run_lengths)(settings, overrides, started=started)


class Passkey(Mode):
    """Whether a number hidden in a long text is found again."""

    of_checkpoint = True

    def heeds(self, settings: Settings) -> tuple[str, ...]:
        return ("attention",)

    def run_checkpoint(self, settings: Settings, hardware: Hardware) -> int:
        from flashtrain_recipes.long_context.passkey_run import evaluate_passkey

        evaluate_passkey(settings, hardware)
        return 0


def _of_texts(settings: Settings) -> bool:
    return settings.task == "fine_tuning"  # the two studies that there are
