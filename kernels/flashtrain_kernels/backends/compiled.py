"""Repeated launches of compiled kernels: launcher.c fills in tensors' addresses and launches
all kernels of a pass."""

import contextlib
import inspect
import logging
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime.build import compile_module_from_src

from ..environment import INTERPRETED, release
from ..launch_cache import Place

PlaceOf = Callable[[Any], Place]
Allocated = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
# Releases whose launchers are known. Others' kernels are launched in Triton's own way.
RELEASES = ((3, 6), (3, 7), (3, 8), (3, 9))
# launcher.c's own numbers: the kernels of a pass, a kernel's values and TMA maps, the addresses
# that a map is held for.
_KERNELS, _VALUES, _MAPS, _WAYS = 8, 128, 8, 4
_LOGGER = logging.getLogger(__name__)


class Entry(NamedTuple):
    """How to launch a compiled kernel: the driver's function (`launch`), and how to encode the TMA
    map of each argument that is a tensor descriptor (`maps`, by the argument's index)."""

    launch: Any
    maps: dict[int, Any]


def entry_of(compiled: Any) -> Entry | None:
    """Return a compiled kernel's Entry: what our launcher launches it by. It is found once and kept
    as an attribute of the kernel. None if this Triton's own launcher is of an unknown kind."""
    if not hasattr(compiled, "flashtrain_entry"):
        compiled.flashtrain_entry = _entry_of(compiled)
    return compiled.flashtrain_entry


def _entry_of(compiled: Any) -> Entry | None:
    """Return a new Entry for a compiled kernel, or None if Triton's launcher is of an unknown kind.
    (With descriptors it is a closure around the driver's function.)"""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        launch = compiled.run.launch
        if not inspect.isfunction(launch):
            return Entry(launch, {})
        names = inspect.getclosurevars(launch).nonlocals
        places = names.get("tensordesc_indices")
        if places is None:  # 3.8: a tree of places, of which none lies within a tuple here
            places = [place for place, within in names["relevant_paths"].items() if not within]
        places, maps = sorted(places), names["tensordesc_meta"]
        return Entry(names["launcher"], dict(zip(places, maps, strict=True)))
    return None


def map_of(descriptor: Any, how: Any) -> list[Any]:
    """Return a tensor descriptor as the driver takes it: [TMA map, *shape, *strides]. how:
    its entry in Entry.maps."""
    # 3.8 hands on the arguments of the launch, which it does not read.
    launch = () if release() < (3, 8) else (None,)
    return driver.make_tensordesc_arg(descriptor, how, *launch)


class Address:
    """A tensor's address and dtype, all that a tensor descriptor reads of a tensor; holding
    this does not hold the tensor's memory. The dtype may be None where an existing descriptor
    is moved to another address."""

    def __init__(self, address: int, dtype: torch.dtype | None = None) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


@cache
def launcher() -> Any:
    """Return the extension module compiled from launcher.c, as Triton compiles its own launcher, or
    None if that fails."""
    source = Path(__file__).with_name("launcher.c").read_text(encoding="utf-8")
    try:
        return compile_module_from_src(
            source, "flashtrain_launcher", include_dirs=driver.include_dirs
        )
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        _LOGGER.warning(
            "short attention calls are slower, as launcher.c could not be built: %s", error
        )
        return None


class Repeated:
    """All launches of one forward or backward; calling it with other tensors repeats them.

    Args:
        launches: the pass's portable.launch.Launch objects, in order.
        compiled: for each the kernel that its start() returned.
        place_of: gives a tensor's or TMA descriptor's launch_cache.Place: a tensor's number,
            and an offset in bytes.
        index: the number of the CUDA device.
        allocated: (shape, strides, dtype) of the results, and then of the workspace
            if the pass needs one.
        results: how many of `allocated` are results, which a call returns.

    Raises:
        ValueError, struct.error: launcher.c cannot launch them.
    """

    def __init__(
        self, launches: Sequence[Any], compiled: Sequence[Any], place_of: PlaceOf, index: int,
        allocated: Allocated,
        results: int,
    ) -> None:  # fmt: skip
        if len(launches) > _KERNELS:
            raise ValueError(
                f"a pass must have at most {_KERNELS} kernels for launcher.c, not {len(launches)}"
            )
        self.launch, self.compiled = launcher().launch, compiled  # kernels that must stay loaded
        pairs = zip(launches, compiled, strict=True)
        self.packed = bytearray(
            b"".join([_packed(launch, kernel, place_of) for launch, kernel in pairs])
        )
        self.index, self.allocated, self.results = index, allocated, results

    @staticmethod
    def watched() -> bool:
        """Return whether Triton has hooks to call around each launch, as profilers set them."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        index = self.index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(tensors)
        # torch.compile's allocation on the current device, which takes half of torch.empty's time.
        stream, empty = torch._C._cuda_getCurrentRawStream(index), guards._empty_strided_cuda  # type: ignore[attr-defined]
        return self.launch(self.packed, index, stream, tensors, empty, self.allocated, self.results)


def _packed(launch: Any, compiled: Any, place_of: PlaceOf) -> bytes:
    """One kernel's launch as the bytes that launcher.c reads: its grid, the values of its
    arguments, which of them are addresses of which tensors, and its TMA maps."""
    run, entry = compiled.run, entry_of(compiled)
    warps, clusters, shared = compiled.packed_metadata
    # A launch's own memory; from 3.8 on, a sanitizer's arguments; what Triton launches
    # with further attributes.
    unknown = (
        run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)
    )
    if entry is None or unknown or clusters != 1 or shared > 228 * 1024:
        raise ValueError(
            "launcher.c cannot launch a kernel with scratch memory, clusters, more than 228 KiB of "
            "shared memory or a launcher of an unknown kind"
        )
    values: list[int] = []
    places: list[int] = []
    maps: list[int] = []

    def add(kind: Any, arg: Any, how: Any) -> None:
        if isinstance(kind, tuple):
            for each in zip(kind, arg, strict=True):
                add(*each, None)
        elif kind.startswith("*"):
            places.extend((len(values), *place_of(arg)))
            values.append(0)
        elif kind.startswith("tensordesc"):
            maps.extend((len(values), *place_of(arg), *_packed_map(arg, how)))
            values.extend((0, *arg.shape, *arg.strides))
        elif kind in ("fp32", "f32"):
            values.append(int.from_bytes(struct.pack("<f", arg), "little"))
        elif kind[0] in "iu":
            values.append(arg)
        elif kind != "constexpr":
            raise ValueError(f"launcher.c cannot pass a kernel argument of type {kind}")

    args = [*launch.args, *launch.constants.values()]
    for index, pair in enumerate(zip(compiled.src.signature.values(), args, strict=True)):
        add(*pair, entry.maps.get(index))
    values += [0, 0]  # the two scratch memories
    count, rest = divmod(len(maps), _MAP)
    assert not rest
    if len(values) > _VALUES or count > _MAPS:
        raise ValueError(
            f"a kernel must have at most {_VALUES} values and {_MAPS} TMA maps for launcher.c, "
            f"not {len(values)} and {count}"
        )
    grid = (*launch.grid, 1, 1)[:3]
    attributes = (bool(run.launch_pdl), bool(run.launch_cooperative_grid))
    numbers = (
        compiled.function,
        *grid,
        32 * warps,
        shared,
        *attributes,
        len(values),
        len(places) // 3,
        count,
    )
    packed = *numbers, *values, *places, *maps
    return struct.pack(f"{len(packed)}q", *packed)


_MAP = 24 + _WAYS * 17  # the numbers that a Map has


def _packed_map(descriptor: Any, how: Any) -> list[int]:
    """Return the words of launcher.c's struct Map for a tensor descriptor. how: its entry in
    Entry.maps."""
    if how is None or how["fp4_padded"] or getattr(descriptor, "round_f32_to_tf32", False):
        raise ValueError(
            "launcher.c cannot encode a TMA map of fp4 numbers, rounded to tf32 or of unknown kind"
        )
    bytes_each, sizes = how["elem_size"], list(descriptor.shape)[::-1]
    strides = [bytes_each * stride for stride in list(descriptor.strides)[-2::-1]]
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(sizes, [bytes_each, *strides], strict=True)
    )
    small = release() >= (3, 7) and span < 128 * 1024
    kind = driver.TMA_DTYPE_DEVICE_TO_HOST[how["elem_type"]]
    first = [kind, len(sizes), how["swizzle"], descriptor.padding == "nan", small]
    three = [[*each, 0, 0, 0, 0, 0][:5] for each in (sizes, strides, list(how["block_size"])[::-1])]
    return [*first, *three[0], *three[1], *three[2], 0, *[-1] * _WAYS, *[0] * 16 * _WAYS]


def repeated(*launched: Any) -> "Repeated | Interpreted | None":
    """Return what repeats launches that were just run, made of Repeated's arguments: an Interpreted
    in Triton's interpreter, else a Repeated, or None if launcher.c cannot launch them."""
    if INTERPRETED:
        return Interpreted(*launched)
    if release() in RELEASES and launcher() is not None:
        with contextlib.suppress(ValueError, struct.error):
            return Repeated(*launched)
    return None


class Interpreted:
    """What Repeated is on a GPU, in Triton's interpreter: it launches the kernels from Python."""

    def __init__(
        self, launches: Sequence[Any], compiled: Sequence[Any], place_of: PlaceOf, index: None,
        allocated: Allocated,
        results: int,
    ) -> None:  # fmt: skip
        self.allocated, self.results = allocated, results
        self.each = [
            (
                replace(launch, args=()),  # tensors would stay in memory
                [None if isinstance(x, Tensor) else x for x in launch.args],
                [
                    (i, *place_of(x), x.dtype)
                    for i, x in enumerate(launch.args)
                    if isinstance(x, Tensor)
                ],
            )
            for launch in launches
        ]

    @staticmethod
    def watched() -> bool:
        """Return False: the interpreter calls no hooks."""
        return False

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        made = tuple(
            [
                torch.empty_strided(shape, strides, dtype=dtype)
                for shape, strides, dtype in self.allocated
            ]
        )
        tensors = *tensors, *made
        for launch, without, places in self.each:
            args = without.copy()
            for place, number, offset, dtype in places:
                args[place] = _behind(tensors[number], offset, dtype)
            launch.kernel[launch.grid](*args, **launch.constants, **launch.options)
        return made[: self.results]


def _behind(x: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Return x's memory from `offset` bytes after its start to the end of its storage, as a 1-D
    tensor of this dtype."""
    storage = x.untyped_storage()
    first = (x.data_ptr() - storage.data_ptr() + offset) // dtype.itemsize
    size = torch.Size([storage.nbytes() // dtype.itemsize - first])
    return torch.empty(0, dtype=dtype).set_(storage, first, size, (1,))
