"""Measure the memory of a model that states no sizes, by one sample's forward and backward: its
tensors are counted, so that every rank and device, also meta, finds the same."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashtrain.models.trainable import Trainable

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made within the `with` block that are alive; `peak` is the
    largest number so far. Those of `known` modules are not counted."""

    def __init__(self, known: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive = {
            one.untyped_storage()._cdata for one in (*known.parameters(), *known.buffers())
        }

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:  # else a view of one that is counted
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def bytes_of_sample(model: Trainable, tokens: int, precision: str, device: torch.device) -> int:
    """Return the peak bytes of one sample's forward and backward, without the weights.

    Args:
        model: the model, on `device`; its weights, buffers and torch's generators do not change.
        tokens: tokens of the sample.
        precision: Lightning's name, such as "bf16-mixed".
        device: a real device or meta.
    """
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    trained = [one for one in model.parameters() if one.requires_grad]
    before = [(one, one.clone()) for one in model.buffers()]
    dtype, real = AUTOCAST.get(precision), device.type != "meta"
    cast = torch.autocast(device.type if real else "cpu", dtype, enabled=dtype is not None and real)
    rng = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with rng, LiveBytes(model) as live:
        with cast:
            loss = model.loss(ids, ids)
        # Not backward(): no gradient stays.
        torch.autograd.grad(loss, trained, allow_unused=True)
    with torch.no_grad():
        for one, value in before:
            one.copy_(value)
    return live.peak
