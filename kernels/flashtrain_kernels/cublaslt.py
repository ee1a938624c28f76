"""cuBLASLt's matrix products with GELU in their epilogue, which torch does not
offer, through ctypes.

M rows (tokens), K inner size, N columns; all tensors are contiguous and row-major. Names and
numbers: NVIDIA's cuBLASLt reference, cublasLtMatmulDescAttributes_t and cublasLtEpilogue_t.
"""

import ctypes
import functools
import logging
import math
import threading
from pathlib import Path

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_COMPUTE_32F = 68
_TRANSA, _EPILOGUE, _BIAS_POINTER, _AUX_POINTER, _AUX_LD, _BIAS_TYPE = 3, 7, 8, 11, 12, 26
_MAX_WORKSPACE = 1
_GELU_AUX_BIAS, _DGELU = 164, 192
_TILE, _CLUSTER = 1, 8  # cublasLtMatmulAlgoConfigAttributes_t
WORKSPACE = 32 * 2**20  # bytes; what NVIDIA recommends for Hopper

# What was fastest on an H200, as (tile, cluster) of the library's numbering: 96 x 128 forward, 128
# x 128 backward. The library's own first choice takes 5 to 20% longer, backward at 32,768 x 4,096 x
# 1,024 1.7 times as long (a kernel for older GPUs). Fixed preferences and no timing: two runs must
# not differ in their rounding.
_FASTEST = {_GELU_AUX_BIAS: ((28, 3), (28, 5)), _DGELU: ((20, 5), (20, 3))}
# From this inner size on its first choice is the fastest.
_OWN_FROM = {_GELU_AUX_BIAS: math.inf, _DGELU: 2048}
# Sizes (N, M, K) for which the library proposes those algorithms; it tells whether one serves
# another size as well.
_PROPOSED_AT = ((3072, 16384, 512), (3072, 32768, 512), (4096, 16384, 512))
_PROPOSALS = 8

_lock = threading.Lock()


class _Heuristic(ctypes.Structure):
    """The C struct cublasLtMatmulHeuristicResult_t: an algorithm and what the library says of
    it."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class CublasLtError(RuntimeError):
    """A cuBLASLt call failed."""


def available() -> bool:
    """Return whether the cuBLASLt library can be called."""
    return _library() is not None


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, inner: Tensor) -> None:
    """Fill inner = x @ weight.T + bias and out = gelu(inner) in one product: x (M, K),
    weight (N, K), bias (N,)."""
    plan = _plan(x.device, x.dtype, (weight.shape[0], x.shape[0], x.shape[1]), True, _GELU_AUX_BIAS)
    plan.run(weight, x, out, bias=bias, aux=inner)


def product_times_gelu_gradient(
    dout: Tensor, weight: Tensor, inner: Tensor, dinner: Tensor
) -> None:
    """Fill dinner = (dout @ weight) * gelu'(inner) in one product; dout (M, K), weight (K,
    N), inner, dinner (M, N)."""
    plan = _plan(
        dout.device, dout.dtype, (weight.shape[1], dout.shape[0], dout.shape[1]), False, _DGELU
    )
    plan.run(weight, dout, dinner, bias=None, aux=inner)


class _Plan:
    """A product of one kind and size, ready to run: descriptors and the algorithm.

    The library's matrices are column-major: a row-major (M, N) is an (N, M) there, and the product
    is D = op(A) B with A the weight.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        transposed: bool,
        epilogue: int,
    ) -> None:
        n, m, k = sizes
        self.handle = _handle(device)
        self.descriptor = ctypes.c_void_p()
        _call(
            "cublasLtMatmulDescCreate",
            ctypes.byref(self.descriptor),
            _COMPUTE_32F,
            _TYPES[torch.float32],
        )
        self._set(_TRANSA, ctypes.c_int32(int(transposed)))
        self._set(_EPILOGUE, ctypes.c_uint32(epilogue))
        self._set(_BIAS_TYPE, ctypes.c_int32(_TYPES[dtype]))
        self._set(_AUX_LD, ctypes.c_int64(n))
        # The heuristic looks at the alignment of these pointers; torch's allocations are aligned
        # to far more than 16.
        self._set(_AUX_POINTER, ctypes.c_void_p(256))
        if epilogue == _GELU_AUX_BIAS:
            self._set(_BIAS_POINTER, ctypes.c_void_p(256))
        self.a, self.b, self.d = _layouts(dtype, sizes, transposed)
        proposals = self._proposals(self.a, self.b, self.d)
        if not proposals:
            raise CublasLtError(
                f"cuBLASLt has no algorithm for a product of {m} x {n} x {k} in {dtype}"
            )
        self.choice = proposals[0]
        if torch.cuda.get_device_capability(device)[0] == 9 and k < _OWN_FROM[epilogue]:
            for others in _PROPOSED_AT:
                proposals += self._proposals(*_layouts(dtype, others, transposed))
            self.choice = next(
                (
                    one
                    for kind in _FASTEST[epilogue]
                    for one in proposals
                    if _kind(one) == kind and self._serves(one)
                ),
                self.choice,
            )

    def _proposals(
        self, a: ctypes.c_void_p, b: ctypes.c_void_p, d: ctypes.c_void_p
    ) -> list[_Heuristic]:
        """The algorithms that the library proposes for matrices of these
        layouts, its favourite first."""
        preference, size = ctypes.c_void_p(), ctypes.c_size_t(WORKSPACE)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        _call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference, _MAX_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(ctypes.sizeof(size)),
        )  # fmt: skip
        results, found = (_Heuristic * _PROPOSALS)(), ctypes.c_int()
        status = _status(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle, self.descriptor, a, b, d, d, preference, _PROPOSALS, results,
            ctypes.byref(found),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return list(results[: found.value]) if status == 0 else []

    def _serves(self, one: _Heuristic) -> bool:
        """Return whether an algorithm, which may be proposed for another size, computes this
        product."""
        result = _Heuristic()
        status = _status(
            "cublasLtMatmulAlgoCheck",
            self.handle, self.descriptor, self.a, self.b, self.d, self.d,
            ctypes.byref(one.algorithm), ctypes.byref(result),
        )  # fmt: skip
        return status == 0 and result.state == 0 and result.workspace <= WORKSPACE

    def run(self, a: Tensor, b: Tensor, d: Tensor, *, bias: Tensor | None, aux: Tensor) -> None:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=d.device)
        stream = torch.cuda.current_stream(d.device).cuda_stream
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        # The pointers are part of the descriptor, which threads share.
        with _lock, torch.cuda.device(d.device):
            self._set(_AUX_POINTER, ctypes.c_void_p(aux.data_ptr()))
            if bias is not None:
                self._set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
            _call(
                "cublasLtMatmul",
                self.handle, self.descriptor, ctypes.byref(one), _pointer(a), self.a, _pointer(b),
                self.b,
                ctypes.byref(zero), _pointer(d), self.d, _pointer(d), self.d,
                ctypes.byref(self.choice.algorithm),
                _pointer(workspace), ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(stream),
            )  # fmt: skip

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call(
            "cublasLtMatmulDescSetAttribute", self.descriptor, attribute, ctypes.byref(value), size
        )


_plan = functools.lru_cache(maxsize=256)(_Plan)


@functools.cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        ctypes.byref(layout), _TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns),
        ctypes.c_int64(rows),
    )  # fmt: skip
    return layout


def _layouts(
    dtype: torch.dtype, sizes: tuple[int, int, int], transposed: bool
) -> tuple[ctypes.c_void_p, ...]:
    """Return the library's layouts of the matrices A, B and D. sizes: (N, M, K); transposed: op(A)
    is A^T."""
    n, m, k = sizes
    a = _layout(dtype, k, n) if transposed else _layout(dtype, n, k)
    return a, _layout(dtype, k, m), _layout(dtype, n, m)


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _kind(one: _Heuristic) -> tuple[int, int]:
    """Return the library's numbers of an algorithm's tile size and cluster size, -1 where it gives
    none."""
    return _configured(one, _TILE), _configured(one, _CLUSTER)


def _configured(one: _Heuristic, attribute: int) -> int:
    # The library writes 2 or 4 bytes; the zeros above them stay.
    value, written = ctypes.c_uint64(0), ctypes.c_size_t()
    size = 2 if attribute == _CLUSTER else 4
    status = _status(
        "cublasLtMatmulAlgoConfigGetAttribute",
        ctypes.byref(one.algorithm), attribute, ctypes.byref(value), ctypes.c_size_t(size),
        ctypes.byref(written),
    )  # fmt: skip
    return int(value.value) if status == 0 else -1


def _call(name: str, *arguments: object) -> None:
    status = _status(name, *arguments)
    if status != 0:
        raise CublasLtError(
            f"cuBLASLt's {name} failed with status {status} (NVIDIA's cublasStatus_t)"
        )


def _status(name: str, *arguments: object) -> int:
    return int(getattr(_library(), name)(*arguments))  # callers ask `available` first


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the cuBLASLt library that this process has loaded already, the one torch was built
    for; None if there is none. Its GELU is the tanh approximation."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        path = next((line.split()[-1] for line in lines if "libcublasLt.so" in line), None)
        return ctypes.CDLL(path) if path else None
    except OSError as error:
        _log.warning("cuBLASLt cannot be loaded (%s): GELU runs as a separate kernel", error)
        return None
