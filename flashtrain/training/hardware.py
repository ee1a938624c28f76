"""Find out what a run can use: its device, memory, peak rate and software versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from flashtrain.errors import UserError
from flashtrain.version import __version__

# Dense bf16 tensor-core peak in FLOP/s (fp16 where the GPU has no bf16), with fp32 accumulation, as
# the vendor's datasheets give it. Datasheets that print only the figure "with sparsity" are halved.
# The first pattern found in the device's name counts, so the special names stand before the general
# ones. (Lightning 2.6.6's get_available_flops has none of an H200 by its usual name, and of some
# GPUs those with sparsity.)
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
    (r"\bH200 NVL\b", 836e12),
    (r"\bG?H200\b", 989e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH[18]00\b", 989e12),
    (r"\bH20\b", 148e12),
    (r"\bA[18]00\b", 312e12),
    (r"\bA30\b", 165e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA10G\b", 70e12),
    (r"\bA10\b", 125e12),
    (r"\bL4\b", 121e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bRTX 6000 Ada\b", 364e12),
    (r"\bRTX A6000\b", 154.8e12),
    (r"\bRTX A5000\b", 111.1e12),
    (r"\bRTX 5090\b", 209.5e12),
    (r"\bRTX 4090\b", 165.2e12),
    (r"\bRTX 4080\b", 97.5e12),
    (r"\bRTX 3090 Ti\b", 80e12),
    (r"\bRTX 3090\b", 71e12),
    (r"\bV100-PCIE\b", 112e12),
    (r"\bV100\b", 125e12),
    (r"\bT4\b", 65e12),
)

# The GPUs that mode=plan can plan for where they are not: name and GiB of memory as PyTorch reports
# them, and compute capability.
PLANNED_GPUS: dict[str, tuple[str, float, tuple[int, int]]] = {
    "h100": ("NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
    "h200": ("NVIDIA H200", 139.7, (9, 0)),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 39.4, (8, 0)),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 79.1, (8, 0)),
    "b200": ("NVIDIA B200", 178.3, (10, 0)),
    "l40s": ("NVIDIA L40S", 44.4, (8, 9)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 23.5, (8, 9)),
}

# The last two are baselines of benchmarks.
_DISTRIBUTIONS = (
    "torch",
    "triton",
    "pytorch-lightning",
    "flashtrain",
    "flash-attn",
    "flash-attn-4",
)

# The share of the device's rate that a compiled training step reaches: assumed for GPUs, of
# which H100s and H200s reached MEASURED_MFU; on a CPU, half the rate of a large matrix product
# is a cautious guess.
GPU_EFFICIENCY = 0.4
MEASURED_MFU = "30% to 57%, recipes/results/gpt2-speed-h200.json and hf-long-two-gpus-h200.json"
CPU_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Hardware:
    """The devices that a run uses, all of one kind: their number, memory, and what they can
    compute."""

    kind: str  # "cpu" or "cuda"
    name: str  # the vendor's
    count: int  # visible GPUs, or the CPU cores that this process may use
    # A GPU's compute capability, (9, 0) for sm_90; None on a CPU.
    capability: tuple[int, int] | None
    # Of the GPU that this process uses, or of the machine; None if unknown.
    total_memory_bytes: int | None
    free_memory_bytes: int | None  # the free part of that memory; None if unknown
    # Dense bf16/fp16 tensor-core FLOP/s of one GPU; None if unknown (MFU is then left out).
    peak_flops: float | None
    precision: str  # Lightning's name of the precision to train in
    attention: str  # the attention to use, "flash" or "sdpa"
    # Free main memory, to which activations may be offloaded; None if unknown.
    host_memory_bytes: int | None = None


def detect_hardware(accelerator: str = "auto") -> Hardware:
    """Return the hardware that a run would train on.

    Args:
        accelerator: "auto" (a GPU if there is one), "cpu" or "gpu".

    Raises:
        UserError: "gpu" without an NVIDIA GPU that torch can use.
    """
    available = torch.cuda.is_available() and torch.version.hip is None
    if accelerator == "gpu" and not available:
        build = "this PyTorch was built without CUDA"
        reason = (
            build if torch.version.cuda is None else "PyTorch finds no usable NVIDIA GPU or driver"
        )
        raise UserError(f"hardware=gpu, but {reason}. Set hardware=cpu or hardware=auto.")
    if accelerator == "cpu" or not available:
        return _cpu()
    return _gpu()


def planned_hardware(gpu: str, count: int) -> Hardware:
    """Return the hardware of `count` GPUs that this machine does not have, for mode=plan; `gpu` is
    a name in PLANNED_GPUS, and all memory counts as free."""
    name, gib, capability = PLANNED_GPUS[gpu]
    memory, peak = int(gib * 2**30), peak_flops_of(name)
    return Hardware(
        "cuda", name, count, capability, memory, memory, peak, precision_for(capability), "flash"
    )


def peak_flops_of(name: str) -> float | None:
    """Return the dense bf16/fp16 tensor-core peak (FLOP/s) of the GPU with this
    name; None if unknown."""
    if "Laptop" in name or "Max-Q" in name:  # same name, other clocks
        return None
    return next(
        (peak for pattern, peak in PEAK_FLOPS if re.search(pattern, name, flags=re.IGNORECASE)),
        None,
    )


def precision_for(capability: tuple[int, int]) -> str:
    """Return a GPU's precision: bf16 from compute capability 8.0 on, fp16 with loss
    scaling on older GPUs."""
    return "bf16-mixed" if capability >= (8, 0) else "16-mixed"


def attention_for(capability: tuple[int, int]) -> str:
    """Return a GPU's attention: "flash" (our kernels) from sm_80 on if Triton is
    installed, else torch's "sdpa"."""
    has_triton = importlib.util.find_spec("triton") is not None
    return "flash" if capability >= (8, 0) and has_triton else "sdpa"


def gpu_index() -> int:
    """Return this process's GPU: that of its local rank (torchrun, SLURM, Lightning's launcher)."""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return int(local_rank) % torch.cuda.device_count() if local_rank.isdigit() else 0


def _gpu() -> Hardware:
    count, index = torch.cuda.device_count(), gpu_index()
    name = torch.cuda.get_device_name(index)
    capability = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    return Hardware(
        kind="cuda",
        name=name,
        count=count,
        capability=capability,
        total_memory_bytes=total,
        free_memory_bytes=free,
        peak_flops=peak_flops_of(name),
        precision=precision_for(capability),
        attention=attention_for(capability),
        host_memory_bytes=_machine_memory()[1],
    )


def _cpu() -> Hardware:
    total, free = _machine_memory()
    return Hardware(
        kind="cpu",
        name=_cpu_name(),
        count=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        capability=None,
        total_memory_bytes=total,
        free_memory_bytes=free,
        peak_flops=None,
        precision="32-true",
        attention="sdpa",
        host_memory_bytes=free,
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def _machine_memory() -> tuple[int | None, int | None]:
    """Return (total, available) bytes of main memory, at most a container's limit; None if
    unknown."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None, None
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for line in meminfo.read_text().splitlines()
        if ":" in line
    }
    total, free = kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemFree"]) * 1024
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and limit < total:
        total = limit
        free = min(free, max(0, limit - (used or 0)))
    return total, free


def _read_int(path: str) -> int | None:
    """Return the integer in a small system file; None if the file is missing or says "max"."""
    file = Path(path)
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def device_name() -> str:
    """Return a text that names this machine's GPUs ("2 x NVIDIA H200"), or without GPUs
    its processor and cores."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        return name if count == 1 else f"{count} x {name}"
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Return the installed versions by name: of python, cuda, torch, triton,
    flashtrain and others."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if "flashtrain" not in found:
        found["flashtrain"] = __version__  # a checkout on a bare PYTHONPATH
    return found


def expected_rate(hardware: Hardware) -> tuple[float, str]:
    """Return (FLOP/s that a training step is expected to reach on one device, a text on where the
    number is from, such as "at 40% of ...")."""
    if hardware.peak_flops is not None:
        peak = f"the peak of {hardware.peak_flops / 1e12:.0f} TFLOP/s"
        how = (
            f"computed at an assumed {GPU_EFFICIENCY:.0%} of {peak}; "
            f"measured language models reached {MEASURED_MFU}"
        )
        return GPU_EFFICIENCY * hardware.peak_flops, how
    device, dtype = hardware.kind, torch.float32 if hardware.kind == "cpu" else torch.float16
    size = 1024 if hardware.kind == "cpu" else 8192
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])
    began, repeats = time.perf_counter(), 3
    for _ in range(repeats):
        float((matrix @ matrix)[0, 0])  # reading a number waits for the device
    rate = repeats * 2 * size**3 / (time.perf_counter() - began)
    return (
        CPU_EFFICIENCY * rate,
        f"at {CPU_EFFICIENCY:.0%} of this machine's matmul rate, measured now",
    )


def duration(seconds: float) -> str:
    """Format a number of seconds as text, in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
