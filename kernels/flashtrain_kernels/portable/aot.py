"""Compile a launch for a GPU that need not be there, and read from the machine code what it costs.

This makes register spills, shared memory and lost tensor-core instructions things that a test on a CPU can check.
"""

import inspect
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .launch import Launch

POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel uses: registers a thread, shared memory in bytes, and counts of machine instructions."""

    registers: int
    shared: int
    spills: int
    instructions: dict[str, int]


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile for sm_<capability> (80, 90, 100, ...). The launch may hold tensors on the meta device.

    Raises whatever the compiler raises. A kernel compiled for a wrong target may abort the process: use a child
    process.
    """
    names = list(inspect.signature(launch.kernel.fn).parameters)
    unspecialised = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    constants = dict(launch.constants)
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = launch.args[index]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        divisible = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if divisible and name not in unspecialised:
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    return used_by(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options)))


def used_by(compiled: Any) -> Compiled:
    """What a kernel that Triton compiled uses, from its machine code."""
    usage, sass = (_dump(compiled.asm["cubin"], option) for option in ("-res-usage", "-sass"))
    operations: dict[str, int] = {}
    for operation in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", sass, re.MULTILINE):
        operations[operation] = operations.get(operation, 0) + 1
    registers = re.search(r"REG:(\d+)", usage)
    return Compiled(
        registers=int(registers.group(1)) if registers else 0,
        shared=compiled.metadata.shared,
        spills=operations.get("LDL", 0) + operations.get("STL", 0),
        instructions=operations,
    )


def _dump(cubin: bytes, option: str) -> str:
    """What cuobjdump says of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
