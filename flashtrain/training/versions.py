"""What a result was measured with: the device's name and the versions of what computes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

_DISTRIBUTIONS = ("torch", "triton", "pytorch-lightning", "flashtrain")


def device_name() -> str:
    """The GPUs of this machine ("2 x NVIDIA H200"), or where it has none its processor and cores."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        return name if count == 1 else f"{count} x {name}"
    return f"{_processor()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Versions of python, torch, triton, cuda, pytorch-lightning and flashtrain; what is not there is left out."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if "flashtrain" not in found:
        found["flashtrain"] = _checkout_version()
    return found


def _checkout_version() -> str:
    # On a bare PYTHONPATH nothing is installed: the package itself says what it is.
    import flashtrain

    return getattr(flashtrain, "__version__", "checkout")


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "CPU"
