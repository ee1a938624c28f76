"""transformers' class with Liger's kernels and flash-attn-4's attention, which many train with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from flashtrain.errors import first_line
from flashtrain_recipes.huggingface_benchmark.baselines.transformers import Transformers
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase

_FUNCTIONS = "liger_kernel.transformers.monkey_patch"  # which change models, by their model_type


@dataclass(eq=False)
class Liger(Transformers):
    """transformers' training step with Liger's norms, SwiGLU, rotary embedding and fused loss."""

    attention: str | None = "flash_attention_4"

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        for package, module in (("liger-kernel", _FUNCTIONS), ("flash-attn-4", "flash_attn.cute")):
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - such imports raise anything
                return f"needs {package}: pip install {package} ({first_line(error)})"
        return None

    def refuses(self, case: HuggingFaceCase) -> str | None:
        kind = self.decoder(case).config.model_type
        known = kind in importlib.import_module(_FUNCTIONS).MODEL_TYPE_TO_APPLY_LIGER_FN
        return None if known else f"Liger has no kernels for {kind}"

    def kernels(self, model: Any) -> Callable[[], AbstractContextManager[object]]:
        module = sys.modules[type(model).__module__]
        before = dict(vars(module))
        functions = importlib.import_module(_FUNCTIONS).MODEL_TYPE_TO_APPLY_LIGER_FN
        functions[model.config.model_type](model=model)
        # Some are put into transformers' module, where they would be the other baselines' too.
        changed = {name: one for name, one in vars(module).items() if before.get(name) is not one}
        vars(module).update(before)
        return partial(_having, module, changed)


@contextmanager
def _having(module: ModuleType, functions: dict[str, Any]) -> Iterator[None]:
    before = {name: vars(module)[name] for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(before)
