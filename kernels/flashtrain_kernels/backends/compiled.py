"""Repeated launches of compiled kernels by the driver's own function: only tensors' addresses are filled in anew."""

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver

from ..bounded import Bounded
from ..environment import release
from ..launch_cache import Place

PlaceOf = Callable[[Any], Place]
# Releases whose launchers are known. Others' kernels are launched in Triton's own way.
RELEASES = ((3, 6), (3, 7), (3, 8), (3, 9))
_MAPS: Bounded[tuple[int, int], Any] = Bounded(16384)  # each is a few hundred bytes
_numbers = itertools.count()


class Entry(NamedTuple):
    """How to launch a compiled kernel: the driver's function (`launch`), and how to encode the TMA map of each argument
    that is a tensor descriptor (`maps`, by the argument's index)."""

    launch: Any
    maps: dict[int, Any]


def entry_of(compiled: Any) -> Entry | None:
    """Return how to launch a compiled kernel, stored with it; None if Triton's launcher is of an unknown kind."""
    if not hasattr(compiled, "flashtrain_entry"):
        compiled.flashtrain_entry = _entry_of(compiled)
    return compiled.flashtrain_entry


def _entry_of(compiled: Any) -> Entry | None:
    """Where there are descriptors, Triton's launcher is a closure around the driver's function."""
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
    """Return a tensor descriptor as the driver takes it: [TMA map, *shape, *strides]. how: its entry in Entry.maps."""
    launch = () if release() < (3, 8) else (None,)  # 3.8 hands on the arguments of the launch, which it does not read
    return driver.make_tensordesc_arg(descriptor, how, *launch)


class Repeated:
    """A kernel launch that can be repeated on other tensors: call it with a CUDA stream and the tensors' addresses."""

    def __init__(self, grid: tuple[int, ...], args: list[Any], compiled: Any, entry: Entry, place_of: PlaceOf) -> None:
        run = compiled.run
        self.args: list[Any] = []  # as the driver takes them: a map is followed by its tensor's shape and strides
        self.addresses: list[tuple[int, int, int]] = []  # of the arguments that are addresses, or a map's: Place
        self.maps: list[tuple[int, int, int, _Map]] = []
        for index, arg in enumerate(args):
            here = len(self.args)
            if index in entry.maps:
                self.maps.append((here, *place_of(arg), _Map(arg, entry.maps[index])))
                self.args += [None, *arg.shape, *arg.strides]
            elif isinstance(arg, Tensor):
                self.addresses.append((here, *place_of(arg)))
                self.args.append(None)
            else:
                self.args.append(arg)
        self.grid, self.launch = (*grid, 1, 1)[:3], entry.launch
        first = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        # No hooks and no metadata for them, no scratch memory.
        self.flat = release() == (3, 6)  # from 3.7 on the kernel's arguments come as one list
        if self.flat:
            self.middle: tuple[Any, ...] = (*first, None, None, compiled.packed_metadata, None, None, None)
        else:
            kinds = run.arg_annotations, run.kernel_signature
            self.middle = (*first, compiled.packed_metadata, None, None, None, None, None, *kinds)

    @staticmethod
    def watched() -> bool:
        """Return whether Triton has hooks to call around each launch, as profilers set them."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def __call__(self, stream: int, addresses: list[int]) -> None:
        args = self.args.copy()
        for place, number, offset in self.addresses:
            args[place] = addresses[number] + offset
        for place, number, offset, encoded in self.maps:
            args[place] = encoded(addresses[number] + offset)
        if self.flat:
            self.launch(*self.grid, stream, *self.middle, *args)
        else:
            self.launch(*self.grid, stream, *self.middle, args)


class _Map:
    """The TMA map of a descriptor at any address. Made once for each, as memory is used over and over (6 us)."""

    def __init__(self, descriptor: Any, how: Any) -> None:
        self.descriptor, self.how, self.number = descriptor, how, next(_numbers)

    def __call__(self, address: int) -> Any:
        key = address, self.number
        known = _MAPS.get(key)
        if known is None:
            moved = copy.copy(self.descriptor)
            moved.base = Address(address)
            known = _MAPS[key] = map_of(moved, self.how)[0]
        return known


class Address:
    """A tensor's address and dtype, all that a tensor descriptor reads of a tensor; holding this does not hold the
    tensor's memory. The dtype may be None where an existing descriptor is moved to another address."""

    def __init__(self, address: int, dtype: torch.dtype | None = None) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def repeated(launch: Any, compiled: Any, place_of: PlaceOf) -> Repeated | None:
    """Return a portable.launch.Launch as a Repeated; None if its kernel or the Triton release cannot be launched so."""
    entry = entry_of(compiled)
    if release() not in RELEASES or entry is None or None in entry.maps.values():
        return None
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None  # a launch's own memory; from 3.8 on, a sanitizer's arguments
    return Repeated(launch.grid, [*launch.args, *launch.constants.values()], compiled, entry, place_of)


class Interpreted:
    """A Repeated for Triton's interpreter: call it with tensors instead of addresses (the stream is not used)."""

    def __init__(self, launch: Any, place_of: PlaceOf) -> None:
        self.tensors = [(i, *place_of(x), x.dtype) for i, x in enumerate(launch.args) if isinstance(x, Tensor)]
        self.args = [None if isinstance(x, Tensor) else x for x in launch.args]
        self.launch = replace(launch, args=())  # tensors would stay in memory

    @staticmethod
    def watched() -> bool:
        """Return False: the interpreter calls no hooks."""
        return False

    def __call__(self, stream: int, tensors: list[Tensor]) -> None:
        launch, args = self.launch, self.args.copy()
        for place, number, offset, dtype in self.tensors:
            args[place] = _behind(tensors[number], offset, dtype)
        launch.kernel[launch.grid](*args, **launch.constants, **launch.options)


def _behind(x: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """All of x's memory from so many bytes behind its start."""
    storage = x.untyped_storage()
    first = (x.data_ptr() - storage.data_ptr() + offset) // dtype.itemsize
    size = torch.Size([storage.nbytes() // dtype.itemsize - first])
    return torch.empty(0, dtype=dtype).set_(storage, first, size, (1,))
