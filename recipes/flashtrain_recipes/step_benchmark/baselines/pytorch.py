"""GPT-2 in plain PyTorch (plain_training.py) as a baseline."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain_recipes.step_benchmark.cases import GPT2Case
from flashtrain_recipes.step_benchmark.plain_training import PlainGPT
from flashtrain_recipes.step_benchmark.training_step import StepBaseline, TrainingStep, usual_step


@dataclass(eq=False)
class Plain(StepBaseline):
    """PlainGPT with one implementation of attention."""

    name: str
    title: str
    compiled: bool = False
    attention: str = "sdpa"  # or "standard"
    backend: SDPBackend | None = None  # the only one that SDPA may use; None: torch chooses

    def missing(self, device: torch.device) -> str | None:
        return "needs an NVIDIA GPU" if self.backend is not None and device.type != "cuda" else None

    def within(self) -> AbstractContextManager[object]:
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def build(self, case: GPT2Case, device: torch.device) -> TrainingStep:
        with torch.device(device):
            model = PlainGPT(case.config(), self.attention)
        loss = model.loss
        if self.compiled:
            loss = torch.compile(loss, dynamic=False, fullgraph=True)
        return usual_step(model, loss, case, device)
