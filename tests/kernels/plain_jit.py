"""Kernels' arithmetic as plain Python: a function of Triton or Gluon, with numbers and NumPy
arrays in place of tiles.

Gluon has no interpreter. What decides where a tile lies and what it visits is integers, though, and
the very source of it can be run: `plain` gives a jitted function, and all that it calls, a language
of a few functions on numbers.
"""

import types
from typing import Any

import numpy as np
from triton.language import constexpr
from triton.runtime.jit import JITFunction


class Pointer:
    """An address within an array."""

    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, places: Any) -> "Pointer":
        return Pointer(self.array, self.at + places)


class Integer(int):
    """A number that a kernel casts, as what it multiplies is."""

    def to(self, dtype: Any) -> "Integer":
        return self

    def __mul__(self, other: int) -> "Integer":
        return Integer(int(self) * other)

    def __floordiv__(self, other: int) -> "Integer":
        return Integer(int(self) // other)

    def __mod__(self, other: int) -> "Integer":
        return Integer(int(self) % other)


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    places, mask = np.broadcast_arrays(pointer.at, mask)
    assert np.all((places[mask] >= 0) & (places[mask] < pointer.array.size)), "it reads elsewhere"
    found = np.where(mask, pointer.array[np.where(mask, places, 0)], other)
    return found if found.ndim else int(found)


class _Array(np.ndarray):
    def to(self, dtype: Any) -> "_Array":
        return self


def lanes(count: int) -> Any:
    """0, 1, 2 and so on, that a kernel casts."""
    return np.arange(count).view(_Array)


def _where(condition: Any, a: Any, b: Any) -> Any:
    found = np.where(condition, a, b)
    return found if found.ndim else found.item()


_LANGUAGE = types.SimpleNamespace(
    constexpr=constexpr, int32="int32", int64="int64", float32="float32",
    minimum=lambda a, b: _number(np.minimum(a, b)), maximum=lambda a, b: _number(np.maximum(a, b)),
    where=_where, load=_load, sum=lambda x, axis: int(np.sum(x, axis)),
    arange=lambda start, end, layout=None: lanes(end),
    BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, num_warps=lambda: 4,
)  # fmt: skip


def _number(x: Any) -> Any:
    return x if x.ndim else int(x)


def plain(jitted: Any, **replaced: Any) -> Any:
    """The jitted function as one of Python. replaced: what stands for names in
    it and in what it calls."""
    function = jitted.fn
    names = dict(function.__globals__)
    for name, value in names.items():
        if name in ("tl", "gl"):
            names[name] = _LANGUAGE
        elif isinstance(value, JITFunction):
            names[name] = _lazy(value, replaced)
        elif isinstance(value, constexpr):
            names[name] = value.value
    names.update(replaced)
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def packed_call(cu_q, cu_k, total_q, total_k, window, heads=1, kv_heads=1, together=1, keys=128):
    """A backward_schedule.Call of packed sequences in items of `keys` keys, and what stands for
    names in the functions that it is given to."""
    from flashtrain_kernels.backends.hopper import backward_schedule, sequences
    from flashtrain_kernels.backends.portable.tiles import Bounds

    number, find = len(cu_q) - 1, plain(sequences.find)
    bounds = Bounds(total_q, total_k, -max(window[0], 0), max(window[1], 0))
    tiles, items = sequences.slots(total_q, number, 64), sequences.slots(total_k, number, keys)
    ends = Pointer(cu_k), Pointer(cu_q)
    call = backward_schedule.Call(
        1.0, heads, bounds, tiles, items, kv_heads, together, None, None, *ends, None, None, None
    )
    noted, found = (
        lambda notes, place: Integer(number),
        lambda *given: tuple(map(Integer, find(*given))),
    )
    return call, {"noted": noted, "find": found, "opaque": lambda x: x}


def _lazy(jitted: Any, replaced: dict[str, Any]) -> Any:
    made: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not made:
            made.append(plain(jitted, **replaced))
        return made[0](*arguments)

    return call
