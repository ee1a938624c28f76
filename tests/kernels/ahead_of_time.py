"""Compile a launch for a GPU that need not be there, and read from the machine code what it costs.

This makes register spills, shared memory, lost tensor-core instructions and serialised products
things that a test on a CPU can check.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from flashtrain_kernels.backends.portable.launch import Launch

_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Without data: what a launch for a GPU that is not there is given."""
    return torch.empty(shape, dtype=dtype, device="meta")


# An instruction and where it is; a load or a store of local memory, predicated or not.
_INSTRUCTION = r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;"
_SPILL = r"(?:@!?U?P\w+\s+)?(?:LDL|STL)(?![A-Z0-9_])"


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel uses: registers a thread, shared memory in bytes, instructions that
    spill registers, how many of them are in its innermost loops with products, and those that
    Hopper has for products (wgmma) and for loading tiles (TMA)."""

    registers: int
    shared: int
    spills: int
    in_loops: int
    wgmma: int
    tma: int


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile for sm_<capability> (80, 90, 100, ...). The launch may hold
    tensors on the meta device.

    Raises whatever the compiler raises. A kernel compiled for a wrong target may abort the
    process: use a child process.
    """
    return _used_by(_compiled(ASTSource, launch, capability))


def compile_gluon_launch(launch: Launch) -> tuple[Compiled, str]:
    """What a Gluon kernel uses on sm_90, and what ptxas said of it. The launch may hold descriptors
    of tensors on the meta device."""
    # Here, because the portable kernels are compiled with releases of Triton
    # whose Gluon is another.
    from triton.experimental.gluon._runtime import GluonASTSource

    said = io.StringIO()
    with contextlib.redirect_stdout(said), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = _compiled(GluonASTSource, launch, 90)
    return _used_by(compiled), said.getvalue() or _ask_ptxas(compiled.asm["ptx"])


def serialised(said: str) -> bool:
    """Does ptxas say that it had to serialise wgmma (C7510 to C7514)?"""
    return bool(re.search(r"C75\d\d", said))


def report(rows: Iterable[dict[str, Any]], strict: bool) -> None:
    """Print rows as JSON; where strict, fail at the end if any has faults."""
    wrong = 0
    for row in rows:
        print(json.dumps(row), flush=True)
        wrong += bool(row["faults"])
    if strict and wrong:
        sys.exit(f"{wrong} kernels have faults under triton {triton.__version__}")


def _compiled(source_type: Any, launch: Launch, capability: int) -> Any:
    """The kernel as Triton compiles it for these arguments when it is called with them."""
    signature: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}

    def typed(value: Any, path: tuple[int, ...], specialised: bool) -> Any:
        """The type of an argument, or of each in a tuple; what is a multiple of 16 is noted."""
        if isinstance(value, tuple):
            types = [typed(each, (*path, place), specialised) for place, each in enumerate(value)]
            return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
        divisible = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if divisible and specialised:
            aligned[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return _POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, int):
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return triton.runtime.jit.mangle_type(value)

    for index, parameter in enumerate(launch.kernel.params):
        if parameter.name in launch.constants:
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = typed(
                launch.args[index], (index,), not parameter.do_not_specialize
            )
    source = source_type(
        fn=launch.kernel, signature=signature, constexprs=dict(launch.constants), attrs=aligned
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options)
    )


def _used_by(compiled: Any) -> Compiled:
    """What a kernel that Triton compiled uses.

    Disassembling takes half a second, however short the kernel: only that of a kernel with memory
    to spill to is read. Products and loads are counted in the PTX: ptxas can make nothing else of a
    wgmma or a TMA load than what it says.
    """
    usage, ptx = _dump(compiled.asm["cubin"], "-res-usage"), compiled.asm["ptx"]
    registers, stack, local = (_number(name, usage) for name in ("REG", "STACK", "LOCAL"))
    spills = in_loops = 0
    if stack or local:
        spills, in_loops = _spills(_dump(compiled.asm["cubin"], "-sass"))
    return Compiled(
        registers=registers,
        shared=compiled.metadata.shared,
        spills=spills,
        in_loops=in_loops,
        wgmma=ptx.count("wgmma.mma_async"),
        tma=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::", ptx)),
    )


def _spills(sass: str) -> tuple[int, int]:
    """How many instructions spill registers, and how many of these are in innermost loops with
    a warpgroup's products.

    A loop is what leads from the target of a branch back to it. Parts of it may lie anywhere:
    addresses tell little.
    """
    found = re.findall(_INSTRUCTION, sass, re.MULTILINE)
    code = [text for _, text in found]
    number = {int(address, 16): i for i, (address, _) in enumerate(found)}
    before: list[list[int]] = [[] for _ in code]
    backward = []
    for i, text in enumerate(code):
        branch = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)$", text)
        if branch:
            target = number[int(branch[1], 16)]
            before[target].append(i)
            if target <= i:
                backward.append((i, target))
        if i + 1 < len(code) and not re.match(r"(?:BRA(?:\.U)?\s+0x|EXIT|RET|BRX)", text):
            before[i + 1].append(i)
    loops = []
    for branch, head in backward:
        loop, left = {head}, [branch]
        while left:
            at = left.pop()
            if at not in loop:
                loop.add(at)
                left += before[at]
        # Where the way back leads to the kernel's begin, the branch closes no loop.
        if 0 not in loop and any("GMMA" in code[i] for i in loop):
            loops.append(loop)
    inner = set().union(*(loop for loop in loops if not any(other < loop for other in loops)))
    spills = [i for i, text in enumerate(code) if re.match(_SPILL, text)]
    return len(spills), sum(i in inner for i in spills)


def _number(name: str, usage: str) -> int:
    found = re.search(rf"{name}:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump does not say how much {name} the kernel uses: {usage}")
    return int(found.group(1))


def _dump(cubin: bytes, option: str) -> str:
    """What cuobjdump says of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _ask_ptxas(ptx: str) -> str:
    """What ptxas says of a kernel that Triton had in its cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        # The assembler that Triton takes for the GPU: 3.9 has a newer one for all of them.
        command = [
            get_ptxas(90).path,
            "-v",
            "--gpu-name=sm_90a",
            str(path),
            "-o",
            str(path.with_suffix(".o")),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
