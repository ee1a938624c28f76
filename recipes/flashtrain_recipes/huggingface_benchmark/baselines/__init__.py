"""The implementations of a decoder's training step: flashtrain's, and transformers' by
attention, kernels and compilation."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

from flashtrain.settings.options import Float8
from flashtrain.training.hardware import Hardware
from flashtrain_recipes.huggingface_benchmark.baselines.base import HuggingFaceBaseline
from flashtrain_recipes.huggingface_benchmark.baselines.flashtrain import Flashtrain
from flashtrain_recipes.huggingface_benchmark.baselines.liger import Liger
from flashtrain_recipes.huggingface_benchmark.baselines.transformers import Transformers
from flashtrain_recipes.step_benchmark.baselines.flashtrain import FLASHTRAIN

LIGER = "transformers, Liger, flash-attn-4"


def everyone(hardware: Hardware, *, updates: bool, compiled: bool) -> list[HuggingFaceBaseline]:
    """Return one instance of every implementation, in the order of the tables.

    Args:
        updates: whether steps update the weights; False measures forward and backward alone.
        compiled: whether flashtrain's layers are compiled by torch.compile.
    """
    theirs = partial(Transformers, hardware=hardware, updates=updates)
    liger = partial(Liger, hardware=hardware, updates=updates)
    ours = partial(Flashtrain, hardware=hardware, updates=updates, compiled=compiled)
    layers: dict[str, Any] = {"compiled": True, "by_layer": True}
    return [
        ours("flashtrain", FLASHTRAIN),
        *(
            ours(f"flashtrain-float8-{name}", f"{FLASHTRAIN}, float8 {name}", float8=name)
            for name in get_args(Float8)
        ),
        theirs("hf-flashtrain", "transformers, flashtrain's attention, eager", attention=None),
        theirs("hf-sdpa", "transformers, SDPA, eager"),
        theirs("hf-sdpa-compile", "transformers, SDPA, compiled", compiled=True),
        theirs("hf-sdpa-compile-layers", "transformers, SDPA, layers compiled", **layers),
        liger("hf-liger-fa4", f"{LIGER}, eager"),
        liger("hf-liger-fa4-compile-layers", f"{LIGER}, layers compiled", **layers),
        liger("hf-liger-fa4-autocast", f"{LIGER}, autocast, eager", autocast=True),
        liger(
            "hf-liger-fa4-autocast-compile-layers",
            f"{LIGER}, autocast, layers compiled",
            autocast=True,
            **layers,
        ),
    ]
