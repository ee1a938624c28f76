"""Text that a trained model continues a prompt with: the sample at a run's end, and mode=generate."""

from __future__ import annotations

import torch
from torch import nn

from flashtrain.data.tokenizers import Tokenizer
from flashtrain.errors import UserError
from flashtrain.models.gpt2 import GPT2
from flashtrain.models.trained_decoders import generate
from flashtrain.settings.settings import GenerateSettings


def default_prompt(source: str) -> str:
    """How a sample begins where no prompt is given: as the text that was trained on may begin."""
    return "import " if source == "stdlib" else "The "


def continue_text(model: nn.Module, tokenizer: Tokenizer, prompt: str, options: GenerateSettings, *, seed: int) -> str:
    """The prompt and what the model writes after it.

    Raises UserError for a model that is no decoder of flashtrain's.
    """
    if not isinstance(model, GPT2):
        raise UserError(f"{type(model).__name__} cannot generate text: only flashtrain's decoders can.")
    device = next(model.parameters()).device
    tokens = torch.tensor([tokenizer.encode(prompt)], device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda" and torch.cuda.is_bf16_supported()):
        written = generate(
            model,
            tokens,
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=seed,
            end_of_text=tokenizer.end_of_text,
        )
    return tokenizer.decode(written[0].tolist())
