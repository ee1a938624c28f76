"""The interface of a backend (the kernels for one kind of GPU), of which dispatch.py
chooses one for each call.

B batch, Sq queries, Sk keys, H query heads, K key/value heads, D head
dimension of queries and keys, Dv of values.
"""

from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..masks.mask import Mask, PlanBlocks
from ..options import Options

Direction = Literal["forward", "backward"]


class Call(NamedTuple):
    """A checked call of attention: q (B, Sq, H, D), k (B, Sk, K, D) and v (B, Sk, K, Dv), each
    with last stride 1, and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options

    def readied(self, plan_blocks: PlanBlocks) -> "Call":
        """Return the call as kernels read it: packed Sequences as a Mask, the Mask with a plan
        for the tile sizes that plan_blocks returns (None: no plan), the Mask's tensors and the
        ALiBi slopes contiguous."""
        options = self.options.with_mask()
        mask, slopes = options.mask, options.alibi_slopes
        if isinstance(mask, Mask):
            keys = None if mask.keys is None else mask.keys.contiguous()
            mask = mask._replace(queries=mask.queries.contiguous(), keys=keys)
            blocks = plan_blocks(
                mask, self.q.shape[3], self.q.dtype, options.beyond_softcap, options.softcap > 0
            )
            mask = mask if blocks is None else mask.planned_for(blocks)
        elif slopes is None:
            return self  # most calls; a copy would cost several microseconds
        options = replace(
            options, mask=mask, alibi_slopes=None if slopes is None else slopes.contiguous()
        )
        return self._replace(options=options)

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Allocate out (B, Sq, H, Dv) in q's dtype and lse (B, H, Sq) in float32,
        contiguous and not filled."""
        shape, device = self.q.shape, self.q.device
        out = torch.empty((*shape[:3], self.v.shape[3]), dtype=self.q.dtype, device=device)
        return out, torch.empty((shape[0], shape[2], shape[1]), dtype=torch.float32, device=device)


def unit_stride(x: Tensor) -> Tensor:
    """Return x, copied if its last stride is not 1 (as in an expanded gradient): kernels
    take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Gradients(NamedTuple):
    """The tensors of a backward besides its Call: it reads dout, dlse, out and lse, and
    fills dq, dk, dv and dbias."""

    dout: Tensor  # (B, Sq, H, Dv), whose last stride is 1
    dlse: Tensor | None  # (B, H, Sq), contiguous
    out: Tensor  # shaped as dout
    lse: Tensor  # shaped as dlse
    dq: Tensor  # dq, dk and dv are filled; any strides whose last is 1
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None  # filled unless it is None; contiguous


class Backend(Protocol):
    """A set of kernels: the interface of the modules portable/backend.py and hopper/backend.py.

    Importing these modules imports neither kernels nor Triton: `serves` and the first call do.
    """

    NAME: str  # for dispatch.force
    TITLE: str  # for explain

    def unavailable(self, device: torch.device) -> str | None:
        """Return None if calls on this device can run on these kernels, else
        the reason why none can."""

    def serves(self, call: Call, direction: Direction) -> str | None:
        """Return None if this call can run on these kernels in this direction, else
        the reason why it cannot."""

    def plan_blocks(
        self, mask: Mask, head_dim: int, dtype: torch.dtype, rich: bool, softcap: bool
    ) -> tuple[int, ...] | None:
        """Return the tile sizes that a mask's plan must have (see Plan.blocks), or None if these
        kernels cannot run its calls. rich: whether the calls have ALiBi, a bias or dropout;
        softcap: whether they have a softcap."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Run the forward of a call that `serves` accepts, and return (out,
        lse), both contiguous."""

    def backward(self, call: Call, gradients: Gradients) -> None:
        """Run the backward of a call that `serves` accepts, and write dq, dk, dv
        and dbias of `gradients`."""

    def describe(self, call: Call, direction: Direction) -> str:
        """Return the tile sizes that this call gets in this direction, as text for `explain`."""
