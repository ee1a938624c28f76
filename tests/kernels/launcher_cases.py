"""What reaches CUDA's driver in a launch, without a GPU: Triton's launcher and ours, built against
a libcuda that only notes what it is asked. However the kernels are launched, it is asked what
Triton's own launch asks.

Run as a program (it needs a C compiler and Python's headers): python launcher_cases.py [--strict]
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from ahead_of_time import report
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

from flashtrain_kernels.backends import Call, Gradients, compiled
from flashtrain_kernels.backends.hopper import backward, forward
from flashtrain_kernels.launch_cache import Place
from flashtrain_kernels.options import Options

STREAM = 11
LIBCUDA = """
#include <string.h>
typedef unsigned long long u64;
/* Of the parameters of the first launch, the second ... in bytes. */
int sizes[5][128], counts[5], launches;
/* Grid, block, shared memory; stream; attributes; function; parameters. */
char seen[5][128 * 128 + 64];
long context = 1, functions = 77;
int encoded, retained, fails;
#define PASS(name) int name() { return 0; }
PASS(cuInit) PASS(cuCtxGetDevice) PASS(cuCtxGetLimit) PASS(cuCtxSetLimit) PASS(cuDeviceGet)
PASS(cuDeviceGetCount) PASS(cuDriverGetVersion) PASS(cuFuncSetAttribute)
PASS(cuFuncSetCacheConfig) PASS(cuModuleUnload) PASS(cuOccupancyMaxActiveClusters)
PASS(cuPointerGetAttributes) PASS(cuStreamIsCapturing) PASS(cuTensorMapEncodeIm2col)
int cuGetErrorString(int code, const char **text) { *text = "an error"; return 0; }
int cuCtxGetCurrent(long *current) { *current = context; return 0; }
int cuCtxSetCurrent(long other) { context = other; return 0; }
int cuDevicePrimaryCtxRetain(long *of_device, int device) {
  *of_device = 5; retained = device; return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(long *function, void *module, const char *name) {
  *function = functions++; return 0;
}
int cuPointerGetAttribute(u64 *value, int attribute, u64 pointer) { *value = pointer; return 0; }
int cuTensorMapEncodeTiled(u64 *map, int type, unsigned rank, u64 address, const u64 *sizes,
                           const u64 *strides, const unsigned *box, const unsigned *steps,
                           int interleave, int swizzle, int l2, int out) {
  encoded++;
  memset(map, 0, 128);
  map[0] = address;
  map[1] = type + 16 * rank + 256 * interleave + 4096 * swizzle + 65536 * l2 + 1048576 * out
      + (1 << 21);
  for (unsigned i = 0; i < rank; i++)
    map[2 + i] = sizes[i] + ((u64)box[i] << 32) + ((u64)steps[i] << 48);
  for (unsigned i = 0; i + 1 < rank; i++) map[8 + i] = strides[i];
  return 0;
}
int cuLaunchKernelEx(const char *config, void *function, void **parameters, void **extra) {
  char *to = seen[launches];
  if (fails) return fails;
  memset(to, 0, sizeof seen[0]);
  memcpy(to, config, 28), to += 28;      /* grid, block, bytes of shared memory */
  memcpy(to, config + 32, 8), to += 8;   /* the stream */
  memcpy(to, config + 48, 4), to += 4;   /* how many attributes */
  memcpy(to, &function, 8), to += 8;
  for (int i = 0; i < counts[launches]; i++)
    memcpy(to, parameters[i], sizes[launches][i]), to += sizes[launches][i];
  launches++;
  return 0;
}
"""


def build(folder: Path) -> ctypes.CDLL:
    """libcuda.so.1, in a folder where Triton looks for it."""
    (folder / "cuda.c").write_text(LIBCUDA)
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-w", "-Wl,-Bsymbolic,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([os.environ.get("CC", "cc"), *options, str(folder / "cuda.c")], check=True)
    (folder / "libcuda.so").symlink_to(library)
    triton.knobs.nvidia.libcuda_path = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Driver(CudaDriver):
    """Triton's own, but for what it asks torch, which has no GPU here."""

    def __init__(self) -> None:
        super().__init__()
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device=0: STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


BYTES = {"b8": 1, "u8": 1, "u16": 2, "u32": 4, "f32": 4, "u64": 8, "b32": 4, "b64": 8}


def parameters(ptx: str) -> list[int]:
    """The bytes of each parameter of a kernel."""
    entry = ptx[ptx.index(".entry") :]
    found = re.findall(
        r"\.param (?:\.align \d+ )?\.(\w+)[^\n\[,)]*(?:\[(\d+)\])?", entry[: entry.index("{")]
    )
    return [BYTES[kind] * int(count or 1) for kind, count in found]


class Cuda:
    """What the noting libcuda was asked."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def number(self, name: str) -> ctypes.c_int:
        """One of its variables."""
        return ctypes.c_int.in_dll(self.library, name)

    def seen(self, function: Any, *kernels: Any) -> list[bytes]:
        """What launches of these compiled kernels ask for. kernels: none where
        the launch returns it."""
        sizes = (ctypes.c_int * 128 * 5).in_dll(self.library, "sizes")
        counts = (ctypes.c_int * 5).in_dll(self.library, "counts")
        launched = self.number("launches")
        counts[:] = [0] * 5
        launched.value = 0
        if not kernels:
            kernels = (function(),)
        wanted = [parameters(kernel.asm["ptx"]) for kernel in kernels]
        for number, each in enumerate(wanted):
            counts[number], sizes[number][: len(each)] = len(each), each
        launched.value = 0
        function()
        assert launched.value == len(kernels), "not as many launches"
        seen = (ctypes.c_char * (128 * 128 + 64) * 5).in_dll(self.library, "seen")
        return [seen[number].raw[: 48 + sum(each)] for number, each in enumerate(wanted)]


def launches(head_dim: int, softcap: float) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Tensors, and all launches of a training step's attention on them."""
    q, k, v, out, dout, dq, dk, dv = tensors = [
        torch.zeros(2, 1024, 4, head_dim, dtype=torch.bfloat16) for _ in range(8)
    ]
    tensors.append(lse := torch.zeros(2, 4, 1024))
    options, empty = Options(0.125, right=0, softcap=softcap), torch.empty

    def kept(*args: Any, **options: Any) -> torch.Tensor:
        tensors.append(made := empty(*args, **options))
        return made

    torch.empty = kept  # workspaces
    try:
        call, gradients = Call(q, k, v, options), Gradients(dout, None, out, lse, dq, dk, dv, None)
        made = {"forward": forward.forward_launches(call, out, lse)[-1]}
        backwards = backward.backward_launches(call, gradients)
    finally:
        torch.empty = empty
    names = ("prepare", "backward", *["dq"] * (len(backwards) - 3), "finish")
    return tensors, {**made, **dict(zip(names, backwards, strict=True))}


def places(tensors: list[torch.Tensor]) -> Any:
    """Where an argument lies: the number of its tensor, and bytes from there."""

    def place_of(arg: Any) -> Place:
        address = (arg.base if hasattr(arg, "base") else arg).data_ptr()
        begins = {x.data_ptr(): number for number, x in enumerate(tensors)}
        begin = max(x for x in begins if x <= address)
        return Place(begins[begin], address - begin)

    return place_of


def own(one: Any) -> Any:
    """Triton's own launch."""
    return one.kernel[one.grid](*one.args, **one.constants, **one.options)


def cases(cuda: Cuda, head_dim: int, softcap: float) -> dict[str, dict[str, Any]]:
    """Of each kernel, whether it is launched as Triton would: at its first and second
    calls, elsewhere, repeated."""
    tensors, made = launches(head_dim, softcap)
    others, elsewhere = launches(head_dim, softcap)
    rows = {}
    kernels, all_wanted = [], []
    for name, first in made.items():
        second = elsewhere[name]
        wanted = [cuda.seen(partial(own, one)) for one in (first, second)]
        assert wanted[0] != wanted[1], "other addresses are not seen"
        kernel = first.start()  # from here on it is known
        got = [cuda.seen(one.start, kernel) for one in (first, second)]
        again = compiled.repeated([first], [kernel], places(tensors), 0, (), 0)
        assert again is not None, "it cannot be repeated"
        repeats = [
            cuda.seen(partial(again.launch, again.packed, 0, STREAM, each, None, (), 0), kernel)
            for each in (tensors, others)
        ]
        ways = {"known": got == wanted, "repeated": repeats == wanted}
        rows[name] = {
            "bytes": len(wanted[0][0]),
            "faults": [way for way, same in ways.items() if not same],
        }
        kernels.append(kernel)
        all_wanted.append([each for (each,) in wanted])
    rows["all"] = {
        "faults": faults_together(cuda, list(made.values()), kernels, all_wanted, (tensors, others))
    }
    return rows


def faults_together(
    cuda: Cuda, made: list[Any], kernels: list[Any], wanted: list[Any], both: tuple[Any, Any]
) -> list[str]:
    """What is wrong where the launches of a step are repeated in one call."""
    again = compiled.repeated(made, kernels, places(both[0]), 3, (), 0)
    assert again is not None, "they cannot be repeated"
    calls = [partial(again.launch, again.packed, 3, STREAM, each, None, (), 0) for each in both]
    empty = iter(both[0][3:])  # what a pass allocates, from the fourth tensor on
    allocating = partial(again.launch, again.packed, 3, STREAM, both[0][:3], lambda _: next(empty))
    faults, maps = [], []
    for number in (0, 1, 0, 1):
        before = cuda.number("encoded").value
        if cuda.seen(calls[number], *kernels) != [each[number] for each in wanted]:
            faults.append("other launches")
        maps.append(cuda.number("encoded").value - before)
    if not maps[0] == maps[1] > 0 == maps[2] == maps[3]:
        faults.append("maps are encoded again where memory alternates")
    references = sys.getrefcount(both[0][3])
    made: list[Any] = []
    what = tuple([(number,) for number in range(len(both[0]) - 3)])
    if cuda.seen(lambda: made.extend(allocating(what, 2)), *kernels) != [
        each[0] for each in wanted
    ]:
        faults.append("other launches where it allocates")
    if len(made) != 2 or made[0] is not both[0][3] or made[1] is not both[0][4]:
        faults.append("other results than what was allocated")
    try:
        again.launch(again.packed, 3, STREAM, both[0][:3], lambda _: 1 / 0, what, 2)
        faults.append("an error of the allocation is not raised")
    except ZeroDivisionError:
        pass
    made.clear()
    if sys.getrefcount(both[0][3]) != references:
        faults.append("references are lost or left")
    cuda.number("context").value = 0
    cuda.seen(calls[0], *kernels)
    if (cuda.number("retained").value, cuda.number("context").value) != (3, 5):
        faults.append("a thread without a context does not get the device's")
    cuda.number("fails").value = 1
    try:
        calls[0]()
        faults.append("an error of the driver is not raised")
    except RuntimeError as error:
        faults += [] if "an error" in str(error) else [str(error)]
    cuda.number("fails").value = 0
    return faults


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cuda = Cuda(build(Path(folder)))
        triton.runtime.driver.set_active(Driver())
        torch.cuda.current_device = lambda: 0
        rows = (
            {"head_dim": head_dim, "softcap": softcap, "kernel": name, **row}
            for head_dim, softcap in ((64, 0.0), (128, 0.0), (72, 30.0), (256, 0.0))
            for name, row in cases(cuda, head_dim, softcap).items()
        )
        report(rows, "--strict" in sys.argv)


if __name__ == "__main__":
    main()
