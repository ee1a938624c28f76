"""What a folder of kernels, one for a kind of GPU, offers in its backend.py to dispatch.py, which chooses.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..masks.mask import Mask, PlanBlocks
from ..options import Options

Direction = Literal["forward", "backward"]


class Call(NamedTuple):
    """One call of attention, checked: q (B, Sq, H, D), k and v (B, Sk, K, D), whose last stride is 1, and the rest."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options

    def readied(self, plan_blocks: PlanBlocks) -> "Call":
        """The call as kernels read it: contiguous options, and a Mask planned for the backend's tiles."""
        options = self.options.with_mask()
        mask, slopes = options.mask, options.alibi_slopes
        if isinstance(mask, Mask):
            keys = None if mask.keys is None else mask.keys.contiguous()
            mask = mask._replace(queries=mask.queries.contiguous(), keys=keys)
            blocks = plan_blocks(mask, self.q.shape[3], self.q.dtype, options.beyond_softcap, options.softcap > 0)
            mask = mask if blocks is None else mask.planned_for(blocks)
        elif slopes is None:
            return self  # most calls; a copy would cost several microseconds
        options = replace(options, mask=mask, alibi_slopes=None if slopes is None else slopes.contiguous())
        return self._replace(options=options)

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """out (B, Sq, H, D) in q's dtype and lse (B, H, Sq) in float32, contiguous, not filled."""
        shape, device = self.q.shape, self.q.device
        out = torch.empty(shape, dtype=self.q.dtype, device=device)
        return out, torch.empty((shape[0], shape[2], shape[1]), dtype=torch.float32, device=device)


class Gradients(NamedTuple):
    """What a backward pass reads besides its call, and what it fills."""

    dout: Tensor  # (B, Sq, H, D), whose last stride is 1
    dlse: Tensor | None  # (B, H, Sq), contiguous
    out: Tensor  # shaped as dout
    lse: Tensor  # shaped as dlse
    dq: Tensor  # dq, dk and dv are filled; any strides whose last is 1
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None  # filled unless it is None; contiguous


class Backend(Protocol):
    """A set of kernels. The modules portable/backend.py and hopper/backend.py are backends; neither imports its
    kernels, or Triton, before it is asked to run or to judge a call that it could serve."""

    NAME: str  # for dispatch.force
    TITLE: str  # for explain

    def unavailable(self, device: torch.device) -> str | None:
        """Why no call on this device can run on these kernels; None where calls can."""

    def serves(self, call: Call, direction: Direction) -> str | None:
        """None, or why a pass of this call does not run on these kernels."""

    def plan_blocks(
        self, mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool, softcap: bool
    ) -> tuple[int, ...] | None:
        """The tile sizes that a mask is planned for (see Plan.blocks) where these kernels will serve calls with it:
        rich ones (ALiBi, bias, dropout), or ones with a softcap."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """(out, lse), contiguous, of a call that is served."""

    def backward(self, call: Call, gradients: Gradients) -> None:
        """Fill the gradients of a call that is served."""

    def describe(self, call: Call, direction: Direction) -> str:
        """The tiles of a pass, in words."""
