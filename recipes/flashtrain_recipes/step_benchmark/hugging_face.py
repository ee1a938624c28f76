"""GPT-2 of Hugging Face transformers, with random weights from a configuration."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtrain_recipes.step_benchmark.case import StepCase
from flashtrain_recipes.step_benchmark.contenders import Contender, usual_step
from flashtrain_recipes.step_benchmark.training_step import TrainingStep


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

    def build(self, case: StepCase, batch: int, device: torch.device) -> TrainingStep:
        model = hugging_face_gpt2(case, device, self.attention)
        forward = torch.compile(model, dynamic=False) if self.compiled else model
        return usual_step(model, partial(hugging_face_loss, forward), case, device)


def hugging_face_gpt2(case: StepCase, device: torch.device, attention: str) -> Any:
    """transformers' model of the case's shape: no dropout, as many embedding rows as every implementation has."""
    from transformers import AutoModelForCausalLM, GPT2Config

    shape = case.config()
    config = GPT2Config(
        vocab_size=shape.vocab_rows,
        n_positions=shape.context,
        n_embd=shape.embed,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.loss_type = "ForCausalLM"  # which it is anyway, after a warning
    return model.train()


def hugging_face_loss(forward: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """transformers' own loss of tokens and labels (B, S); shift_labels tells it that the labels are shifted already."""
    return forward(input_ids=tokens, labels=labels, shift_labels=labels).loss
