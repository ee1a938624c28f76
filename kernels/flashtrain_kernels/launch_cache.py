"""A cache of recorded launches: most of a short attention call's time goes into decisions,
which repeating skips.

What a forward or backward allocates and launches follows from its options and its tensors' shapes,
strides, dtypes and alignment. Its second run is recorded; later runs allocate the same tensors,
fill in the addresses and launch the same kernels. Tensors' contents are not recorded.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.utils._python_dispatch import TorchDispatchMode

from . import environment

K = TypeVar("K")
V = TypeVar("V")
_APART = 512  # bytes between workspaces, as between torch's own allocations
_PLAIN = (Tensor, torch.nn.Parameter)
_active = threading.local()
_RECENT: dict[int, "list[_Signed]"] = {}  # by the number of tensors; the newest first
_MOST_RECENT = 8  # kinds of layers in a model
_ALIGNED: list[int] = []  # all tensors, to 16 bytes


class Bounded(dict[K, V]):
    """A dict that is emptied when it holds `most` entries and a new key is set."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)


class Signature:
    """What `signature` returns: tensors that it finds alike get one and the same object, so that
    dicts find it by identity, quickly."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        self.dtypes = dtypes  # of the tensors


_SIGNATURES: Bounded[tuple[Any, ...], Signature] = Bounded(4096)


def signature(tensors: Sequence[Tensor]) -> Signature | None:
    """Return a key of the tensors' shapes, strides, dtypes, devices and alignment, on which kernel
    launches depend. None if operators must be called normally: under compilers, transforms and
    torch modes, and for special tensors."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
    ):
        return None
    state = environment.forced, torch.are_deterministic_algorithms_enabled()
    recent = _RECENT.get(len(tensors))
    if recent is None:
        recent = _RECENT[len(tensors)] = []
    for known in recent:
        if known.fits(tensors, state):
            return known.signed
    signs: list[Any] = []
    for x in tensors:
        if (
            type(x) not in _PLAIN
            or x.layout is not torch.strided
            or x.is_nested
            or x.is_neg()
            or x._is_zerotensor()
        ):
            return None
        if (
            not (x.is_cuda or x.is_cpu)
            or not torch._C._has_storage(x)
            or torch._is_functional_tensor(x)
        ):
            return None  # wrappers of vmap and the like, which outlive their transform
        signs.append((x.shape, x.stride(), x.dtype, x.device))
    int32 = [i for i, x in enumerate(tensors) if x.dtype is torch.int32]
    addressed = _addressed(tensors, int32)
    key = *state, *signs, *addressed
    signed = _SIGNATURES.get(key)
    if signed is None:
        signed = _SIGNATURES[key] = Signature([x.dtype for x in tensors])
    first: dict[int, int] = {}
    same = [(i, j) for i, x in enumerate(tensors) if (j := first.setdefault(id(x), i)) != i]
    distinct = [*first.values()]
    guard = guards.TensorGuards(
        *[tensors[i] for i in distinct], dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    recent.insert(0, _Signed(guard, distinct, same, int32, state, addressed, signed))
    del recent[_MOST_RECENT:]
    return signed


def _addressed(tensors: Sequence[Tensor], int32: list[int]) -> list[int]:
    """Return each tensor's address modulo 16, then, for the tensors whose indices are in `int32`,
    numbers that are equal where their addresses are equal."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    if bits % 16 == 0 and not int32:
        return _ALIGNED
    # Have queries and keys one cu_seqlens? Hopper's dropout asks (backends/hopper/dropout_rng.py).
    addresses = [x.data_ptr() for x in tensors]
    numbers: dict[int, int] = {}
    return [x % 16 for x in addresses] + [
        numbers.setdefault(addresses[i], len(numbers)) for i in int32
    ]


class _Signed(NamedTuple):
    """A Signature with what recognizes further tensors that have it, which takes a quarter of the
    time of making one."""

    # torch.compile's check of distinct tensors: types, dispatch keys, dtypes,
    # devices, shapes, strides.
    guard: Any
    distinct: list[int]
    same: list[tuple[int, int]]  # a tensor and the first one that is the same object
    int32: list[int]
    state: tuple[Any, ...]
    addressed: list[int]
    signed: Signature

    def fits(self, tensors: Sequence[Tensor], state: tuple[Any, ...]) -> bool:
        """Return whether the tensors, in this state of the process, have this signature."""
        if self.same:
            for i, j in self.same:
                if tensors[i] is not tensors[j]:
                    return False
            alike = self.guard.check(*[tensors[i] for i in self.distinct])
        else:
            alike = self.guard.check(*tensors)
        return alike and state == self.state and _addressed(tensors, self.int32) == self.addressed


def applies(device: torch.device) -> bool:
    """Return whether kernels can be launched on this device: on a GPU, or on a CPU
    in Triton's interpreter."""
    return device.type == "cuda" or (environment.INTERPRETED and device.type == "cpu")


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context manager that makes `device` the current one, on which
    Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Place(NamedTuple):
    """Where a kernel's pointer points: a tensor's index (among inputs, results, workspace)
    and an offset in bytes."""

    number: int
    offset: int


class _RefusedError(Exception):
    pass


class Recorder(TorchDispatchMode):
    """A torch mode that records allocations and launches of one computation (launched
    later), and refuses all else."""

    _ALLOCATE = ("empty", "new_empty", "empty_like")

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.launches: list[Any] = []  # of class Launch
        self._kept: list[Any] = []  # whose identities are keys
        self._roots: dict[int, tuple[Tensor, int]] = {}
        # By address: torch may return what it made as a copy.
        self._at: dict[int, tuple[Tensor, int] | None] = {}
        for x in given:
            self._note(x, x, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
        if name in self._ALLOCATE:
            made = func(*args, **(kwargs or {}))
            self.allocated.append(made)
            self._note(made, made, 0)
            return made
        if name in ("squeeze_", "transpose_"):  # which change a tensor's shape alone
            return func(*args, **(kwargs or {}))
        if func.is_view and func.namespace == "aten":
            seen = func(*args, **(kwargs or {}))
            for part in seen if isinstance(seen, (list, tuple)) else (seen,):
                self.is_within(part, args[0], part.data_ptr() - args[0].data_ptr())
            return seen
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is NotImplemented:
            raise _RefusedError(func)
        return parts

    def is_within(self, part: Any, whole: Tensor, offset: int = 0) -> None:
        """Record that part, a view or a TMA descriptor, starts `offset` bytes after the
        start of tensor `whole`."""
        root, before = self.root_of(whole)
        self._note(part, root, before + offset)

    def _note(self, x: Any, root: Tensor, offset: int) -> None:
        self._kept.append(x)
        self._roots[id(x)] = root, offset
        if isinstance(x, Tensor) and x.numel():
            known = self._at.setdefault(x.data_ptr(), (root, offset))
            if known is None or known[0] is not root:  # two given tensors at one address
                self._at[x.data_ptr()] = None

    def root_of(self, x: Any) -> tuple[Tensor, int]:
        """Return the input or allocated tensor whose memory x lies in, and x's offset
        in bytes from its start."""
        known = self._roots.get(id(x))
        if known is None and isinstance(x, Tensor) and x.numel():
            known = self._at.get(x.data_ptr())
        if known is None:
            raise _RefusedError(x)
        return known


def recorder() -> Recorder | None:
    """Return the Recorder that is active in this thread, or None."""
    return getattr(_active, "recorder", None)


def record(function: Callable, tensors: Sequence[Tensor]) -> tuple[Any, Any] | None:
    """Run function(tensors) and return (its results, a repeater), or None if recording is refused.
    The repeater is what `compiled.repeated` makes, to repeat the launches on other tensors, or
    None."""
    # Objects that are distinct where two of the tensors are one.
    given = [x.detach() for x in tensors]
    recorded = Recorder(given)
    device = given[0].device
    with torch.no_grad(), on_device(device):
        try:
            _active.recorder = recorded
            with recorded:
                results = function(given)
        except _RefusedError:
            return None
        finally:
            _active.recorder = None
        compiled = [launch.start() for launch in recorded.launches]
        return results, _repeated(recorded, given, results, compiled)


def _repeated(
    recorded: Recorder, given: list[Tensor], results: Sequence[Tensor], compiled: list[Any]
) -> Any:
    starts = {id(x): Place(number, 0) for number, x in enumerate(given)}
    try:
        for number, x in enumerate(results, len(given)):
            if x.numel():
                root, _ = recorded.root_of(x)
                dense = x.is_contiguous() or (x.dim() == 4 and x.transpose(1, 2).is_contiguous())
                same = root.numel() == x.numel() and root.dtype == x.dtype and dense
                if not same or id(root) in starts:
                    return None  # a part of something, or what was given
                starts[id(root)] = Place(number, 0)
        workspace = 0
        for x in recorded.allocated:
            if x.device != given[0].device or not x.is_contiguous():
                return None
            if id(x) not in starts:
                starts[id(x)] = Place(len(given) + len(results), workspace)
                workspace += -(-x.nbytes // _APART) * _APART

        def place_of(x: Any) -> Place:
            root, offset = recorded.root_of(x)
            number, start = starts[id(root)]
            return Place(number, start + offset)

        allocated = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        if workspace:
            allocated.append(((workspace,), (1,), torch.uint8))
        launches, index = recorded.launches, given[0].device.index
        if not launches:
            return None
        return launches[0].repeated(
            launches, compiled, place_of, index, tuple(allocated), len(results)
        )
    except _RefusedError:
        return None
