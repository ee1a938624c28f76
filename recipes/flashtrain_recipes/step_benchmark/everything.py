"""One contender of each name that the settings know."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.attention import SDPBackend

from flashtrain.settings.settings import Settings
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.step_benchmark.contenders import Contender, Plain
from flashtrain_recipes.step_benchmark.hugging_face import HuggingFace
from flashtrain_recipes.step_benchmark.ours import Ours

FLASHTRAIN = "flashtrain"
BASELINE = "Hugging Face, eager"


def all_contenders(settings: Settings, hardware: Hardware, *, compiled: bool) -> list[Contender]:
    """In the order of names.STEP_IMPLEMENTATIONS. compiled: whether those that are compiled on a GPU are so here."""
    how = ", compiled" if compiled else ""

    def ours(name: str, title: str, attention: str, told: Settings = settings) -> Contender:
        return Ours(name, title, settings=told, hardware=hardware, compiled=compiled, attention=attention)

    float32_residual = replace(settings, model=replace(settings.model, residual="weights"))

    return [
        ours("flashtrain", FLASHTRAIN, "flash"),
        ours("flashtrain-float32-residual", "flashtrain, residual=weights", "flash", float32_residual),
        ours("flashtrain-sdpa", "flashtrain, attention=sdpa", "sdpa"),
        ours("flashtrain-standard", "flashtrain, attention=standard", "standard"),
        Plain("pytorch", f"plain PyTorch, SDPA{how}", compiled=compiled),
        Plain("pytorch-cudnn", f"plain PyTorch, cuDNN{how}", compiled=compiled, backend=SDPBackend.CUDNN_ATTENTION),
        Plain("standard", f"plain PyTorch, standard attention{how}", compiled=compiled, attention="standard"),
        HuggingFace("hf-eager", BASELINE, attention="eager"),
        HuggingFace("hf-sdpa", "Hugging Face, SDPA", attention="sdpa"),
        HuggingFace(
            "hf-sdpa-compile", "Hugging Face, SDPA, compiled", attention="sdpa", compiled=True, may_compile=compiled
        ),
    ]
