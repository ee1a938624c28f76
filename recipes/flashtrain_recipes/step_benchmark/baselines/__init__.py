"""The implementations of GPT-2 whose training steps are measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch.nn.attention import SDPBackend

from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.step_benchmark.baselines.flashtrain import FLASHTRAIN, Flashtrain
from flashtrain_recipes.step_benchmark.baselines.hugging_face import EAGER, HuggingFace
from flashtrain_recipes.step_benchmark.baselines.pytorch import Plain
from flashtrain_recipes.step_benchmark.training_step import StepBaseline


def all_baselines(settings: Settings, hardware: Hardware, *, compiled: bool) -> list[StepBaseline]:
    """Return one instance of every implementation, in the order of the tables.

    Args:
        compiled: whether flashtrain's and plain PyTorch's models are compiled by torch.compile.
    """
    how = ", compiled" if compiled else ""
    ours = partial(Flashtrain, hardware=hardware, compiled=compiled, settings=settings)
    wide = settings.having(model=replace(settings.model, residual="weights"))
    return [
        ours("flashtrain", FLASHTRAIN, attention="flash"),
        ours(
            "flashtrain-float32-residual",
            "flashtrain, residual=weights",
            attention="flash",
            settings=wide,
        ),
        ours("flashtrain-sdpa", "flashtrain, attention=sdpa", attention="sdpa"),
        ours("flashtrain-standard", "flashtrain, attention=standard", attention="standard"),
        Plain("pytorch", f"plain PyTorch, SDPA{how}", compiled=compiled),
        Plain(
            "pytorch-cudnn",
            f"plain PyTorch, cuDNN{how}",
            compiled=compiled,
            backend=SDPBackend.CUDNN_ATTENTION,
        ),
        Plain(
            "standard",
            f"plain PyTorch, standard attention{how}",
            compiled=compiled,
            attention="standard",
        ),
        HuggingFace("hf-eager", EAGER, attention="eager"),
        HuggingFace("hf-sdpa", "Hugging Face, SDPA", attention="sdpa"),
        HuggingFace(
            "hf-sdpa-compile", "Hugging Face, SDPA, compiled", attention="sdpa", compiled=True
        ),
    ]
