"""cuBLAS's interface for matrix products with options that torch's do not have, as far as it is used here.

The library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from qsim_kernels.private import blas_handle as _handle

# Numbers from cublasLt.h and library_types.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_IN_FLOAT32 = 68
_POINTER_MODE, _TURNS, _EPILOGUE, _BIAS = 2, (3, 4), 7, 8
_ON_DEVICE, _ADDS_BIAS = 1, 4
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
#: Sums may be split, but only if their parts are added in float32.
_REDUCED_IN_FLOAT32 = 3
_WORKSPACE_BYTES = 32 * 2**20
#: What the addresses of matrices are multiples of, in bytes.
ALIGNMENT = 16

_POINTERS = {"MatmulDescDestroy": 1, "MatrixLayoutDestroy": 1, "MatmulPreferenceDestroy": 1, "MatmulPreferenceCreate": 1}
_SIGNATURES = {name: [c_void_p] * count for name, count in _POINTERS.items()} | {
    "MatmulDescCreate": [c_void_p, c_int, c_int],
    "MatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "MatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, c_void_p, c_void_p],
    "Matmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


class _Algorithm(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: an algorithm and what it needs."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Stored(NamedTuple):
    """A matrix in memory, which cuBLAS reads by columns.

    Attributes:
        dtype: Its dtype.
        rows: The number of adjacent elements.
        columns: How often there are that many.
        step: The elements from the first of these to the first of the next.
    """

    dtype: torch.dtype
    rows: int
    columns: int
    step: int


class CublasProduct:
    """A product on the current device, times a number, plus a bias for each row of the result if asked: in float32, then rounded.

    Args:
        left: The left matrix.
        turns_left: Whether it is transposed first.
        right: The right matrix.
        turns_right: Whether it is transposed first.
        result: The result.
        adds_bias: Whether a bias is added.

    Attributes:
        workspace_bytes: The size of the memory that it needs while it is computed.
    """

    def __init__(self, left: Stored, turns_left: bool, right: Stored, turns_right: bool, result: Stored, *, adds_bias: bool) -> None:
        self._operation = _made("MatmulDesc", _IN_FLOAT32, _TYPES[torch.float32])
        self._layouts = [_made("MatrixLayout", _TYPES[x.dtype], *x[1:]) for x in (left, right, result)]
        for kind, pointer in (("MatmulDesc", self._operation), *(("MatrixLayout", layout) for layout in self._layouts)):
            weakref.finalize(self, _call, f"{kind}Destroy", pointer).atexit = False
        turns = zip(_TURNS, (turns_left, turns_right), strict=True)
        for attribute, number in ((_POINTER_MODE, _ON_DEVICE), *turns, *([(_EPILOGUE, _ADDS_BIAS)] if adds_bias else [])):
            _set("MatmulDesc", self._operation, attribute, c_int32(number))
        algorithm = self._chosen()
        self.exists = algorithm is not None
        self.workspace_bytes = algorithm.workspace if algorithm is not None else 0
        self._algorithm, self._run = algorithm and byref(algorithm), _library().cublasLtMatmul

    def launch(
        self, left: int, right: int, out: int, *, number: int, zero: int, bias: int | None, workspace: int | None, stream: int
    ) -> None:
        """Compute it on a stream, from the addresses of tensors; one thread at a time."""
        operation, (a, b, c) = self._operation, self._layouts
        if bias is not None:
            _set("MatmulDesc", operation, _BIAS, c_void_p(bias))
        operands = number, left, a, right, b, zero, out, c, out, c
        memory = workspace, self.workspace_bytes
        _check("Matmul", self._run(_handle(), operation, *operands, self._algorithm, *memory, stream))

    def _chosen(self) -> _Algorithm | None:
        """The algorithm that cuBLAS expects to be the fastest, if it has one."""
        wishes = _made("MatmulPreference")
        _set("MatmulPreference", wishes, _WORKSPACE, c_size_t(_WORKSPACE_BYTES))
        _set("MatmulPreference", wishes, _REDUCTIONS, c_uint32(_REDUCED_IN_FLOAT32))
        for attribute in _ALIGNMENTS:
            _set("MatmulPreference", wishes, attribute, c_uint32(ALIGNMENT))
        algorithm, count, (a, b, c) = _Algorithm(), c_int(), self._layouts
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            _handle(), self._operation, a, b, c, c, wishes, 1, byref(algorithm), byref(count)
        )
        _call("MatmulPreferenceDestroy", wishes)
        return None if status or not count.value else algorithm


@cache
def is_loaded() -> bool:
    """Whether torch has loaded the library."""
    try:
        return bool(_library())
    except OSError:
        return False


@cache
def _library() -> Any:
    library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    for name, types in _SIGNATURES.items():
        getattr(library, f"cublasLt{name}").argtypes = types
    return library


def _made(kind: str, *options: Any) -> c_void_p:
    made = c_void_p()
    _call(f"{kind}Create", byref(made), *options)
    return made


def _set(kind: str, subject: c_void_p, attribute: int, value: Any) -> None:
    _call(f"{kind}SetAttribute", subject, attribute, byref(value), ctypes.sizeof(value))


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_library(), f"cublasLt{name}")(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS: {name} returned status {status}")
