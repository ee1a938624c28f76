"""What the loss of a transformers decoder adds to its body: its head's scale and cap,
and the balancing loss."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashtrain.integrations.huggingface_layers import body_of
from flashtrain.models.sharded_sequence import sharded_sequence


class Balance(NamedTuple):
    """Parameters of the routers' load-balancing loss; `loss` computes it as transformers'
    load_balancing_loss_func."""

    coefficient: float  # of the loss in the sum that is trained
    experts: int  # of a layer
    top: int  # experts that a token is routed to

    def loss(self, router_logits: Sequence[Tensor], batch: int) -> Tensor:
        """Compute the balancing loss, a scalar over all layers' and devices' tokens, before
        the factor `coefficient`.

        Args:
            router_logits: (tokens, experts) for each layer, or for each chunk of a layer in order.
            batch: The number of rows, B.
        """
        sequence, sums, first = sharded_sequence(), [], 0
        if sequence is not None:  # 1 for this device's tokens, 0 for padding
            real = sequence.shard(
                torch.ones(batch, sequence.length, device=router_logits[0].device)
            ).flatten()
        for logits in router_logits:
            chances = logits.flatten(0, -2).softmax(-1)
            chosen = torch.zeros_like(chances).scatter_(
                1, chances.topk(self.top, dim=-1).indices, 1.0
            )
            both = torch.cat((chosen, chances, torch.ones_like(chances[:, :1])), 1).float()
            if sequence is not None:
                both = (
                    both
                    * real[(first + torch.arange(len(both), device=real.device)) % len(real), None]
                )
                first += len(both)
            sums.append(both.sum(0))
        total = torch.stack(sums).sum(0)
        total = total if sequence is None else sequence.summed(total)
        counts, chances, rows = total.split((self.experts, self.experts, 1))
        return self.experts * (counts / rows * (chances / rows)).sum()


def balance_of(module: Any) -> Balance | None:
    """Return the balancing loss that transformers adds for a mixture of experts;
    None where it adds none."""
    config, own = module.config.get_text_config(), vars(sys.modules[type(module).__module__])
    if "load_balancing_loss_func" not in own or not getattr(config, "output_router_logits", False):
        return None
    coefficient = getattr(
        config, "aux_loss_coef" if config.model_type == "jetmoe" else "router_aux_loss_coef"
    )
    return Balance(coefficient, module.num_experts, module.num_experts_per_tok)


class Head(NamedTuple):
    """The map from lm_head's output x to logits: softcap * tanh(scale * x / softcap),
    scale * x where softcap is 0."""

    scale: float
    softcap: float


@torch.no_grad()
def head_of(module: Any) -> Head | None:
    """Find the scale and softcap that a model applies to lm_head's output; None where it
    applies another function.

    They are measured: the model's forward runs once with fixed states in place of its
    body, and without lm_head.
    """
    head, config = module.get_output_embeddings(), module.config.get_text_config()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return None
    probe = torch.linspace(-60, 60, 25, dtype=torch.float64, device="cpu")[None, None]
    head_name = next(name for name, one in module.named_modules() if one is head)
    body_name, body = body_of(module)
    fixed: Any = nn.Module()  # without the body's parts: a model that calls one of them (OPT) fails
    fixed.forward = lambda *_, **__: _states(probe)
    try:
        module._modules[body_name] = fixed
        module.set_submodule(head_name, nn.Identity())
        with torch.device("cpu"):  # whatever the model is built on
            logits = module(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    except Exception:  # noqa: BLE001 - whatever failed, the model will compute its logits itself
        return None
    finally:
        module._modules[body_name] = body
        module.set_submodule(head_name, head)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    one = logits[0, 0, 13]
    slope = float((torch.atanh(one / softcap) * softcap if softcap else one) / probe[0, 0, 13])
    expected = softcap * torch.tanh(slope * probe / softcap) if softcap else slope * probe
    known = math.isfinite(slope) and torch.allclose(logits.double(), expected, rtol=1e-6, atol=1e-6)
    return Head(slope if abs(slope - 1) > 1e-6 else 1.0, softcap) if known else None


def _states(hidden: Tensor) -> Any:
    """Return an output of a model's body that has these states, and None for any other attribute
    that a head may read."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class States(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            return None

    return States(last_hidden_state=hidden)
