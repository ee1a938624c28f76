"""flashtrain's training step of a transformers model, and transformers' own in a plain loop: on the very same weights,
by the very same optimiser, so that one set of both is on the device and steps differ in forward and backward alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain.settings.settings import Settings
from flashtrain.tasks.components import make_model
from flashtrain.tasks.language.prepare import make_task
from flashtrain.training.hardware import Hardware
from flashtrain.training.steps import clip_gradients
from flashtrain_recipes.huggingface_benchmark.cases import HuggingFaceCase
from flashtrain_recipes.step_benchmark.baselines.flashtrain import FLASHTRAIN, batch_loss, save_memory
from flashtrain_recipes.step_benchmark.baselines.hugging_face import hugging_face_loss
from flashtrain_recipes.step_benchmark.training_step import (
    MemoryChoice,
    StepBaseline,
    TrainingStep,
    autocast_of,
    precision_of,
)

CHECKPOINTING = "gradient checkpointing"


class GradientsOnly(torch.optim.SGD):
    """Lets gradients go, and the weights as they are: forward and backward are measured by themselves."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class Shared:
    """The weights on the device, and their optimiser, of the latest case; every implementation's own model has them.

    updates: False for forward and backward alone.
    """

    def __init__(self, hardware: Hardware, *, updates: bool) -> None:
        self.hardware, self.updates = hardware, updates
        self._case: HuggingFaceCase | None = None
        self._state: tuple[HuggingFaceDecoder, torch.optim.Optimizer, Any, Callable[[], object]] | None = None

    def hardware_of(self, case: HuggingFaceCase) -> Hardware:
        """The machine, with the precision that the case's weights mean."""
        return replace(self.hardware, precision=precision_of(case, self.hardware.kind))

    def decoder(self, case: HuggingFaceCase) -> tuple[HuggingFaceDecoder, Settings, MemoryChoice]:
        """flashtrain's model on the meta device, its settings, and its memory savings."""
        settings, hardware = case.settings(), self.hardware_of(case)
        model = cast(HuggingFaceDecoder, make_model(settings, vocab_size=0, attention=hardware.attention))
        model.keep_in(hardware.precision)
        return model, settings, save_memory(settings, hardware, model)

    def step(
        self, case: HuggingFaceCase, module: Any, model: nn.Module, loss: Any, device: torch.device
    ) -> TrainingStep:
        """A step of this loss. module: transformers' class, on the meta device, within `model`."""
        case_of_all = replace(case, batch=1)
        if self._case != case_of_all or self._state is None:
            self._state = None  # before the next one's are made
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            torch.manual_seed(case.told.seed)
            owner, settings, _ = self.decoder(case)
            owner.materialise(device)
            task = make_task(settings, self.hardware_of(case), owner, {})
            clip: Callable[[], object] = partial(clip_gradients, owner, task.gradient_clip)
            if self.updates:
                found = task.configure_optimizers()
                self._state = owner, found["optimizer"], found["lr_scheduler"]["scheduler"], clip
            else:
                trained = [one for one in owner.parameters() if one.requires_grad]
                self._state = owner, GradientsOnly(trained, lr=0.0), None, lambda: None
            self._case = case_of_all
        owner, optimizer, schedule, clip = self._state
        for mine, theirs in zip(module.modules(), owner.module.modules(), strict=True):
            mine._parameters, mine._buffers = theirs._parameters, theirs._buffers
        return TrainingStep(model.train(), loss, optimizer, clip, autocast=autocast_of(case, device), schedule=schedule)


class OneOfAll(StepBaseline):
    """An implementation whose weights and optimiser states are all of the measurement's."""

    shares = True

    def __init__(self, name: str, title: str, shared: Shared, *, compiled: bool) -> None:
        self.name, self.title, self.shared, self.compiled = name, title, shared, compiled


class Flashtrain(OneOfAll):
    """What recipe=hf trains: the loss in pieces, our attention, the savings of `memory`, layers compiled one by one."""

    adapts = True

    def memory(self, case: HuggingFaceCase) -> MemoryChoice:
        return self.shared.decoder(case)[2]

    def build(self, case: HuggingFaceCase, device: torch.device) -> TrainingStep:
        model, settings, _ = self.shared.decoder(case)
        settings.trainer.compile = False
        task = make_task(settings, self.shared.hardware_of(case), model, {})
        step = self.shared.step(case, model.module, model, partial(batch_loss, task), device)
        if self.compiled:
            model.compile_blocks(dynamic=False, fullgraph=True)
        return step


class Transformers(OneOfAll):
    """transformers' model with its own loss, layers checkpointed where flashtrain computes any of them again.

    attention: transformers' name; None: ours, by register_with_transformers. by_layer: compiled layer by layer.
    """

    def __init__(
        self,
        name: str,
        title: str,
        shared: Shared,
        *,
        attention: str | None = "sdpa",
        compiled: bool = False,
        by_layer: bool = False,
        may_compile: bool = True,
    ) -> None:
        super().__init__(name, title, shared, compiled=compiled)
        self.attention, self.by_layer, self.may_compile = attention, by_layer, may_compile

    def memory(self, case: HuggingFaceCase) -> MemoryChoice:
        ours = self.shared.decoder(case)[0].savings
        return MemoryChoice() if ours.checkpointing == "none" else MemoryChoice(CHECKPOINTING)

    def build(self, case: HuggingFaceCase, device: torch.device) -> TrainingStep:
        import transformers

        from flashtrain.integrations import register_with_transformers

        ours, settings, _ = self.shared.decoder(case)
        ours.config.use_cache = False
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                ours.config, attn_implementation=self.attention or register_with_transformers(), dtype=torch.float32
            )
        if settings.model.adapter is not None:
            model.add_adapter(ours.module.peft_config["default"])
        step = self.shared.step(case, model, model, partial(hugging_face_loss, model), device)
        if self.memory(case).words:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.compiled:
            for part in decoder_layers(model) if self.by_layer else [model]:
                part.compile(dynamic=False)
        return step


def everyone(shared: Shared, compiled: bool) -> list[StepBaseline]:
    """In the order of settings.HF_IMPLEMENTATIONS. compiled: whether those that are compiled on a GPU are so here."""
    theirs = partial(Transformers, shared=shared, compiled=True, may_compile=compiled)
    return [
        Flashtrain("flashtrain", FLASHTRAIN, shared, compiled=compiled),
        Flashtrain("flashtrain-eager", "flashtrain, eager", shared, compiled=False),
        Transformers("hf-flashtrain", "transformers, flashtrain's attention, eager", shared, attention=None),
        Transformers("hf-sdpa", "transformers, SDPA, eager", shared),
        theirs("hf-sdpa-compile", "transformers, SDPA, compiled"),
        theirs("hf-sdpa-compile-layers", "transformers, SDPA, layers compiled", by_layer=True),
    ]
