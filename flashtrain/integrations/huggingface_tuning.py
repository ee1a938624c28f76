"""Tuning of flash-linear-attention's kernels for a hybrid, before its training begins.

At the first call for new heads and dimensions Triton times a kernel's configurations: minutes for
a layer. So each kind of mixer runs on a short row first. Triton stores the times for later runs.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from copy import deepcopy
from importlib import metadata
from typing import Any

import torch
from torch import nn

from flashtrain.announce import say
from flashtrain.files.caches import default_cache_dir, only_writer
from flashtrain.integrations.huggingface_layers import decoder_layers
from flashtrain.integrations.huggingface_mixers import using
from flashtrain.integrations.huggingface_specs import mixers_with_states
from flashtrain_kernels.recurrences import Rows, SharedRows

# Of the row: but for l2norm's (seconds) no key has them; of fewer all configurations are alike.
TOKENS, DOCUMENTS = 4096, 8
COMPUTED = {"bf16": torch.bfloat16, "16": torch.float16}  # by the beginning of a precision


def tune(module: Any, device: torch.device, precision: str, *, shared: bool) -> None:
    """Tune the kernels of transformers' hybrid, not sharded, unless this machine's cache has their
    times; weights are not read.

    Args:
        device: the current GPU.
        precision: Lightning's name, such as "bf16-mixed".
        shared: whether devices will share sequences, which takes calls with states.
    """
    computed = COMPUTED.get(precision.partition("-")[0])
    if computed is None:
        say(f"{type(module).__name__}: slow, in plain torch, with hardware.precision={precision}")
        return
    from triton import knobs

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = (one for layer in decoder_layers(module) for one in mixers_with_states(layer))
    mixers = {repr([one, *(x.shape for x in one.parameters())]): one for one in found}
    versions = [metadata.version(name) for name in ("torch", "triton", "fla-core")]
    key = repr((sorted(mixers), gpu, versions, precision, shared)).encode()
    folder = default_cache_dir() / "triton"
    done = folder / f"{type(module).__name__}-{hashlib.sha256(key).hexdigest()[:16]}.tuned"
    # The first process tunes, the others wait and read.
    alone = nullcontext() if done.exists() else only_writer(done, "XDG_CACHE_HOME")
    mixed = torch.autocast(device.type, computed, enabled=precision.endswith("mixed"))
    with knobs.cache.scope(), alone, mixed, using(_rows(device, shared)):
        knobs.cache.dir = str(folder)  # torch.compile changes TRITON_CACHE_DIR
        if not done.exists():
            say(
                f"tuning the kernels of {type(module).__name__} for {gpu}, which takes minutes, "
                f"once a machine (stored in {folder})"
            )
        for mixer in mixers.values():
            _run(mixer, module.config.get_text_config().hidden_size, device)
        if not done.exists():  # another user may have written it
            done.touch()


def _rows(device: torch.device, shared: bool) -> Rows:
    tokens = torch.arange((1 + shared) * TOKENS)
    whole = (tokens % (TOKENS // DOCUMENTS))[None].to(device)
    if not shared:
        return Rows(whole)
    of_ranks = tokens.view(1, 2, -1)
    return SharedRows(whole[:, :TOKENS], whole, of_ranks, 0, lambda x: torch.stack((x, x)))


def _run(mixer: nn.Module, embed: int, device: torch.device) -> None:
    """Run a copy of a mixer forward and backward; what it computes does not matter."""
    made = deepcopy(mixer).to_empty(device=device)
    for one in (*made.parameters(), *made.buffers()):
        one.data.fill_(0.01)
    dtype = next(one.dtype for one in made.parameters() if one.dim() > 1)
    hidden = torch.full((1, TOKENS, embed), 0.01, device=device, dtype=dtype, requires_grad=True)
    found = made(hidden)
    found = found[0] if isinstance(found, tuple) else found
    found.backward(torch.ones_like(found))
