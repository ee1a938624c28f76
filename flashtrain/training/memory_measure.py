"""Measure the memory of a model that states no sizes, by a sample's forward and backward: its
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
    """Return the bytes that a further sample takes in a forward and backward: what two take more
    than one, so that gradients and copies of weights are left out.

    Args:
        model: the model, on `device`; its weights, buffers and torch's generators do not change.
        tokens: tokens of the sample.
        precision: Lightning's name, such as "bf16-mixed".
        device: a real device or meta.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    before = [(one, one.clone()) for one in model.buffers()]
    dtype, real = AUTOCAST.get(precision), device.type != "meta"
    kind = device.type if real else "cpu"
    saved, peaks = [], []
    for samples in (1, 2):
        ids = torch.zeros(samples, tokens, dtype=torch.int64, device=device)
        rng = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with rng, LiveBytes(model) as live:
            with torch.autocast(kind, dtype, enabled=dtype is not None and real):
                loss = model.loss(ids, ids)
            saved.append(live.now)
            # Not backward(): no gradient stays.
            torch.autograd.grad(loss, trained, allow_unused=True)
        peaks.append(live.peak)
    with torch.no_grad():
        for one, value in before:
            one.copy_(value)
    # Gradients may hide what the backward of few tokens needs, never what the forward saves.
    return max(peaks[1] - peaks[0], saved[1] - saved[0])
