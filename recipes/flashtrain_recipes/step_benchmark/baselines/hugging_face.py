"""transformers' GPT-2 with random weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.step_benchmark.cases import GPT2Case
from flashtrain_recipes.step_benchmark.training_step import StepBaseline, TrainingStep, usual_step

EAGER = "Hugging Face, eager"  # what speed-ups are over


@dataclass(eq=False)
class HuggingFace(StepBaseline):
    """A model of transformers as a baseline; here GPT-2."""

    name: str
    title: str
    attention: str  # transformers' name: "eager" (the S x S matrix) or "sdpa" (torch's kernels)
    compiled: bool = False

    def missing(self, device: torch.device) -> str | None:
        found = importlib.util.find_spec("transformers") is not None
        return None if found else "needs transformers: pip install 'flashtrain[hub]'"

    def build(self, case: Any, device: torch.device) -> TrainingStep:
        model = hugging_face_gpt2(case, device, self.attention)
        forward = torch.compile(model, dynamic=False) if self.compiled else model
        return usual_step(model, partial(hugging_face_loss, forward), case, device)


def hugging_face_gpt2(case: GPT2Case, device: torch.device, attention: str) -> Any:
    """Return transformers' GPT-2 with the case's shape and without dropout, in training mode."""
    from transformers import AutoModelForCausalLM, GPT2Config

    shape = case.config()
    heads: Any = shape.layers[0].mixer
    config = GPT2Config(
        vocab_size=shape.vocab_rows, n_positions=shape.context, n_embd=shape.embed,
        n_layer=len(shape.layers),
        n_head=heads.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.loss_type = "ForCausalLM"  # which it is anyway, after a warning
    return model.train()


def hugging_face_loss(forward: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of transformers' model `forward`; labels[b, s] is the token after
    tokens[b, s], both (B, S)."""
    return forward(input_ids=tokens, labels=labels, shift_labels=labels).loss
