"""Rejecting a module whose tokens would see only their own device's part of the sequence.

A model that computes attention by itself (transformers', nn.MultiheadAttention,
scaled_dot_product_attention), or mixes tokens by a recurrence or a convolution, would see only its
own device's tokens, and nothing else in a training shows that its loss is wrong. So the first step
of each kind (training, validation, test, prediction) is probed before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from flashtrain.distributed.context.batch import TOKENS
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.errors import UserError, first_line
from flashtrain.models.token_probe import probe

# tokens of a rank, the first and last of which change: a prime, which no number of heads is.
PROBED = 13
DECLARE = (
    "Use flashtrain.Attention, or another strategy (fsdp, ddp), or if that is intended (tokens on "
    "their own, batch norm, experts of limited capacity) declare shares_sequences = True in the "
    "class of the model, or of your own LightningModule."
)


class _StepEnded(Exception):
    """Raised by a probed step's call of manual_backward, where the probe of this step ends."""


def check_shared(
    module: pl.LightningModule,
    step: str,
    precision: Callable[[], Any],
    sequence: ContextSequence,
    *given: Any,
) -> bool:
    """Raise UserError if a step calls no attention that devices share, or if anything else in it
    mixes tokens.

    It runs the step in evaluation mode on a few tokens of the batch. What the module
    logs, its lists and metrics, modes and random states stay as they are. Under FSDP
    every rank must call this.

    Args:
        step: the name of the module's method, such as "training_step".
        precision: the context manager in which Lightning calls it.
        sequence: the batch's sharded sequence.
        given: the step's arguments, this rank's part of the batch first.

    Returns:
        False for a training step that returned None before any attention: it shows nothing, and
        the next step must be checked. Otherwise True.
    """
    tokens = min(PROBED, sequence.length)
    modes = [(one, one.training) for one in module.modules()]
    outputs = []

    def run(changed: bool) -> None:
        with isolate_rng(), precision(), suppress(_StepEnded):
            outputs.append(
                getattr(silent_twin(module), step)(
                    _few_tokens(given[0], sequence, tokens, changed), *given[1:]
                )
            )

    module.eval()
    try:
        shared, moved = probe(run, tokens, slice(1, -1))
    except UserError:
        raise
    except Exception as error:
        fails = f"{type(module).__name__}.{step} fails on {tokens} tokens ({first_line(error)})"
        raise UserError(
            f"{fails}, on which it is run first to find what mixes tokens. {DECLARE}"
        ) from error
    finally:
        for one, mode in modes:
            one.training = mode
    passed_over = step == "training_step" and any(output is None for output in outputs)
    if moved is None and (shared or passed_over):
        return shared > 0
    devices = f"the {sequence.layout.degree} devices that hold parts of each sequence"
    found = f"no attention is shared by {devices}"
    if shared:
        found = "tokens see each other by more than shared attention"
    what = f"a {step.replace('_', ' ')} in which {found}{'' if moved is None else f' ({moved})'}"
    raise UserError(
        f"{what}: every token would see only its own device's part of the sequence. {DECLARE}"
    )


def silent_twin(module: pl.LightningModule) -> Any:
    """Return a stand-in for the module that logs nothing; its lists, dicts and sets, and
    submodules without weights, are copies, so that a probe does not change the module's."""
    twin: Any = object.__new__(type(module))
    vars(twin).update(
        {name: copy(x) if type(x) in (dict, list, set) else x for name, x in vars(module).items()}
    )
    for name, child in module.named_children():
        twin._modules[name] = child if any(True for _ in child.parameters()) else deepcopy(child)
    twin.log, twin.manual_backward = (lambda *_, **__: None), _end_step
    return twin


def _end_step(*_: Any, **__: Any) -> None:
    raise _StepEnded


def _few_tokens(
    batch: dict[str, Any], sequence: ContextSequence, tokens: int, changed: bool
) -> dict[str, Any]:
    few = dict(batch)
    for name, x in batch.items():
        if name in ("cu_seq_lens_q", "cu_seq_lens_k"):  # transformers' bounds of packed documents
            few[name] = x.new_tensor([0, tokens])
        elif (
            isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] in (sequence.held, sequence.length)
        ):
            few[name] = part = x[:1, torch.arange(tokens) % sequence.held]
            if changed and name in TOKENS:
                part[:, [0, -1]] = torch.where(part > 0, part - 1, part + 1)[:, [0, -1]]
    return few
