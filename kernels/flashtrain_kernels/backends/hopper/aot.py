"""Compile a Gluon launch for sm_90 with no GPU, and read from the machine code what it costs. See portable/aot.py."""

import contextlib
import inspect
import io
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

from ..portable.aot import POINTERS, Compiled, used_by
from ..portable.launch import Launch


def compile_launch(launch: Launch) -> tuple[Compiled, str]:
    """What the kernel uses, and what ptxas said of it, so that spills and lost wgmma become things that a test on a CPU
    can check. The launch may hold tensors (and descriptors of tensors) on the meta device."""
    names = list(inspect.signature(launch.kernel.fn).parameters)
    unspecialised = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(names):
        if name in launch.constants:
            signature[name] = "constexpr"
            continue
        value = launch.args[index]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = mangle_type(value)
        divisible = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if divisible and name not in unspecialised:
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=launch.kernel, signature=signature, constexprs=dict(launch.constants), attrs=aligned)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))
    return used_by(compiled), said.getvalue() or _ask_ptxas(compiled.asm["ptx"])


def serialised(said: str) -> bool:
    """Does ptxas say that it had to serialise wgmma (C7510 to C7514)?"""
    return bool(re.search(r"C75\d\d", said))


def _ask_ptxas(ptx: str) -> str:
    """What ptxas says of a kernel that Triton had in its cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            triton.knobs.nvidia.ptxas.path,
            "-v",
            "--gpu-name=sm_90a",
            str(path),
            "-o",
            str(path.with_suffix(".o")),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
