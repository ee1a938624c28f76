"""AdamW with float32 copies of bfloat16 weights, the optimizer of all baselines but flashtrain.

It is frozen as flashtrain's own was in November 2026, so that a faster optimizer of flashtrain's
is not given to what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHUNK = 2**28  # elements of the gradients that a step holds in float32: 1 GiB


class MasterCopies(torch.optim.AdamW):
    """torch's fused AdamW, which updates float32 copies of the parameters, then rounds them.

    Args:
        groups: parameter groups of bfloat16 parameters, as torch.optim.AdamW's.
        options: further arguments of torch.optim.AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in groups:
            copies = [one.detach().float().requires_grad_() for one in group["params"]]
            self.pairs += zip(group["params"], copies, strict=True)
            group["params"] = copies
        super().__init__(groups, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters, a part of them at a time."""
        for pairs in self._parts():
            for weight, copy in pairs:
                copy.grad = None if weight.grad is None else weight.grad.float()
            super().step()
            torch._foreach_copy_([weight for weight, _ in pairs], [copy for _, copy in pairs])
            for _, copy in pairs:
                copy.grad = None

    def _parts(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        part: list[tuple[Tensor, Tensor]] = []
        for pair in self.pairs:
            if part and sum(copy.numel() for _, copy in part) + pair[1].numel() > _CHUNK:
                yield part
                part = []
            part.append(pair)
        yield part

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the parameters' gradients; the copies have gradients only within a step."""
        for weight, _ in self.pairs:
            weight.grad = None
