"""The implementations of GPT-2 whose training steps are measured: PyTorch alone, Hugging Face's, and flashtrain's, the
model, optimiser, clipping, compilation and memory settings of `python -m flashtrain recipe=gpt2`.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtrain.data.packing import Batch
from flashtrain.models.trainable import Trainable
from flashtrain.settings.groups import MaskSettings
from flashtrain.settings.settings import Settings
from flashtrain.tasks import LanguageModel
from flashtrain.tasks.batching import choose_batching
from flashtrain.tasks.components import make_model
from flashtrain.tasks.language.prepare import make_task
from flashtrain.training.hardware import Hardware
from flashtrain.training.memory import GIB
from flashtrain_recipes.step_benchmark.plain_training import PlainGPT
from flashtrain_recipes.step_benchmark.training_step import (
    Contender,
    MemoryChoice,
    StepCase,
    TrainingStep,
    WeightsHeld,
    task_step,
    usual_step,
)

FLASHTRAIN = "flashtrain"
BASELINE = "Hugging Face, eager"
NO_END = 1_000_000  # steps of the learning rate's schedule: more than are ever measured


class Plain(Contender):
    """PlainGPT, compiled where that is wanted. attention: see PlainGPT; backend: the only one that SDPA may take."""

    def __init__(
        self, name: str, title: str, *, compiled: bool, attention: str = "sdpa", backend: SDPBackend | None = None
    ) -> None:
        self.name, self.title = name, title
        self.compiled, self.attention, self.backend = compiled, attention, backend

    def missing(self, device: torch.device) -> str | None:
        return "needs an NVIDIA GPU" if self.backend is not None and device.type != "cuda" else None

    def build(self, case: StepCase, batch: int, device: torch.device) -> TrainingStep:
        with torch.device(device):
            model = PlainGPT.of(case.config(), self.attention)
        compiled = torch.compile(model.loss, dynamic=False, fullgraph=True) if self.compiled else model.loss
        within = nullcontext if self.backend is None else partial(sdpa_kernel, self.backend)
        return usual_step(model, compiled, case, device, within=within)


class HuggingFace(Contender):
    """GPT2LMHeadModel. attention: transformers' name, "eager" (the S x S matrix) or "sdpa" (torch's kernels).

    compiled: by torch.compile, where that may be (may_compile).
    """

    def __init__(
        self, name: str, title: str, *, attention: str, compiled: bool = False, may_compile: bool = True
    ) -> None:
        self.name, self.title, self.attention = name, title, attention
        self.compiled, self.may_compile = compiled, may_compile

    def missing(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("transformers") is None:
            return "needs transformers: pip install 'flashtrain[hub]'"
        if self.compiled and not self.may_compile:
            return "is compiled, on a CPU only with benchmark.compile=true"
        return None

    def build(self, case: Any, batch: int, device: torch.device) -> TrainingStep:
        model = hugging_face_gpt2(case, device, self.attention)
        forward = torch.compile(model, dynamic=False) if self.compiled else model
        return usual_step(model, partial(hugging_face_loss, forward), case, device)


def hugging_face_gpt2(case: StepCase, device: torch.device, attention: str) -> Any:
    """transformers' model of the case's shape: no dropout, as many embedding rows as every implementation has."""
    from transformers import AutoModelForCausalLM, GPT2Config

    shape = case.config()
    config = GPT2Config(
        vocab_size=shape.vocab_rows, n_positions=shape.context, n_embd=shape.embed, n_layer=shape.layers,
        n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.loss_type = "ForCausalLM"  # which it is anyway, after a warning
    return model.train()


def hugging_face_loss(forward: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """transformers' own loss of tokens and labels (B, S); shift_labels tells it that the labels are shifted already."""
    return forward(input_ids=tokens, labels=labels, shift_labels=labels).loss


def save_memory(settings: Settings, hardware: Hardware, model: Trainable) -> MemoryChoice:
    """Make the model give time for memory as the settings say, and return how.

    settings: of one case, with context and trainer.micro_batch. hardware: with the case's attention and precision.
    model: not compiled yet, and perhaps on the meta device, where only the choice is wanted.
    """
    if model.shape is None:
        return MemoryChoice()
    batching = choose_batching(settings, hardware, model)
    model.save_memory(batching.savings)
    estimate = None if batching.estimate is None else round(batching.estimate.total / GIB, 2)
    return MemoryChoice(batching.savings.describe(), estimate)


class Ours(Contender):
    """What the settings train, of the case's size and context. attention: as the setting `attention`."""

    adapts = True

    def __init__(
        self, name: str, title: str, *, settings: Settings, hardware: Hardware, compiled: bool, attention: str
    ) -> None:
        self.name, self.title, self.attention, self.compiled = name, title, attention, compiled
        self.settings, self.hardware = settings, hardware

    def memory(self, case: StepCase, batch: int) -> MemoryChoice:
        with torch.device("meta"):
            return self._model(case, batch)[1]

    def build(self, case: StepCase, batch: int, device: torch.device) -> TrainingStep:
        with torch.device(device):
            model, _ = self._model(case, batch)
        if case.is_bfloat16:
            model.to(torch.bfloat16)
        settings, hardware = self._settings(case, batch), self._hardware(case)
        task = make_task(settings, hardware, model.train(), {})
        return task_step(task, model, partial(batch_loss, task), case, device)

    def _model(self, case: StepCase, batch: int) -> tuple[Trainable, MemoryChoice]:
        """The model with random weights on torch's current device, and its memory settings."""
        settings, hardware = self._settings(case, batch), self._hardware(case)
        model = make_model(settings, vocab_size=case.vocab_size, attention=hardware.attention)
        return model, save_memory(settings, hardware, model)

    def _settings(self, case: StepCase, batch: int) -> Settings:
        """The settings that train this case: a step is one micro-batch of `batch` sequences."""
        told = deepcopy(self.settings)
        told.context, told.mask, told.data.document_mask = case.context, MaskSettings(), False
        told.model.size, told.model.vocab_rows = case.model, case.vocab_rows
        told.trainer.micro_batch, told.trainer.tokens_per_step = batch, batch * case.context
        told.trainer.steps, told.trainer.compile = NO_END, self.compiled
        told.optimizer.master_weights = case.has_masters
        return told

    def _hardware(self, case: StepCase) -> Hardware:
        precision = precision_of(case, self.hardware.kind)
        # as machine.settle does: flash only where the machine has it
        attention = self.attention if self.attention != "flash" else self.hardware.attention
        return replace(self.hardware, precision=precision, attention=attention)


def precision_of(case: WeightsHeld, kind: str) -> str:
    """Lightning's name of what a case's weights mean on a "cuda" or "cpu" device (contenders.autocast_of)."""
    if case.is_bfloat16:
        return "bf16-true"
    return "bf16-mixed" if kind == "cuda" else "32-true"


def batch_loss(task: LanguageModel, tokens: Tensor, labels: Tensor) -> Tensor:
    # without a document mask nothing else of a batch is read
    return task.batch_loss(cast(Batch, {"tokens": tokens, "labels": labels}))


def all_contenders(settings: Settings, hardware: Hardware, *, compiled: bool) -> list[Contender]:
    """In the order of settings.STEP_IMPLEMENTATIONS. compiled: whether those that are compiled on a GPU are so here."""
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
