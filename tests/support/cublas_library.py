"""cuBLAS's matrix products as its documentation defines them, on tensors in the memory of the CPU."""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import torch
from torch import Tensor

# Numbers from cublasLt.h and library_types.h.
_DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
_POINTER_MODE, _TURN_A, _TURN_B, _EPILOGUE, _BIAS = 2, 3, 4, 7, 8
_ADDS_BIAS, _MAX_WORKSPACE = 4, 1


class CublasLibrary:
    """The functions that qsim calls, by the names of the library.

    Args:
        workspace: The memory that every algorithm asks for, in bytes.
        has_algorithms: Whether there is an algorithm for any product.
    """

    def __init__(self, workspace: int = 0, has_algorithms: bool = True) -> None:
        self._workspace, self._has_algorithms = workspace, has_algorithms
        self._numbers = count(1)
        #: What was made and not destroyed: attributes, or dtype, rows, columns and step.
        self.made: dict[int, Any] = {}
        self.launches = 0

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> int:  # noqa: N802
        assert (compute, scale) == (68, 0)  # in float32
        return self._make(out, {})

    def cublasLtMatrixLayoutCreate(self, out: Any, dtype: int, rows: int, columns: int, step: int) -> int:  # noqa: N802
        assert step >= rows
        return self._make(out, (_DTYPES[dtype], rows, columns, step))

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:  # noqa: N802
        return self._make(out, {})

    def cublasLtMatmulDescSetAttribute(self, subject: Any, attribute: int, value: Any, size: int) -> int:  # noqa: N802
        assert size == ctypes.sizeof(value._obj)
        self.made[subject.value][attribute] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute  # noqa: N815

    def cublasLtMatmulDescDestroy(self, subject: Any) -> int:  # noqa: N802
        del self.made[subject.value]
        return 0

    cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = cublasLtMatmulDescDestroy  # noqa: N815

    def cublasLtMatmulAlgoGetHeuristic(  # noqa: N802
        self, handle: int, operation: Any, a: Any, b: Any, c: Any, d: Any, wishes: Any, most: int, found: Any, number: Any
    ) -> int:
        assert most == 1
        assert self._workspace <= self.made[wishes.value][_MAX_WORKSPACE]
        found._obj.workspace, number._obj.value = self._workspace, int(self._has_algorithms)
        return 0

    def cublasLtMatmul(  # noqa: N802
        self,
        handle: int,
        operation: Any,
        alpha: int,
        a: int,
        a_layout: Any,
        b: int,
        b_layout: Any,
        beta: int,
        c: int,
        c_layout: Any,
        d: int,
        d_layout: Any,
        algorithm: Any,
        workspace: int | None,
        size: int,
        stream: int,
    ) -> int:
        attributes = self.made[operation.value]
        assert attributes[_POINTER_MODE] == 1  # numbers lie on the device
        assert bool(workspace) == bool(size) == bool(self._workspace)
        left, right, result = (self._matrix(*given) for given in ((a, a_layout), (b, b_layout), (d, d_layout)))
        assert (c, c_layout.value) == (d, d_layout.value)
        assert _number(beta) == 0
        product = _turned(left, attributes[_TURN_A]).float() @ _turned(right, attributes[_TURN_B]).float() * _number(alpha)
        if attributes.get(_EPILOGUE) == _ADDS_BIAS:
            product = product + _tensor(attributes[_BIAS], result.dtype, len(result))[:, None]
        result.copy_(product)
        self.launches += 1
        return 0

    def _make(self, out: Any, what: Any) -> int:
        out._obj.value = next(self._numbers)
        self.made[out._obj.value] = what
        return 0

    def _matrix(self, pointer: int, layout: Any) -> Tensor:
        dtype, rows, columns, step = self.made[layout.value]
        return _tensor(pointer, dtype, step * (columns - 1) + rows).as_strided((rows, columns), (1, step))


def _tensor(pointer: int, dtype: torch.dtype, elements: int) -> Tensor:
    """Memory of a tensor that is alive."""
    return torch.frombuffer((ctypes.c_char * (elements * dtype.itemsize)).from_address(pointer), dtype=dtype)


def _number(pointer: int) -> float:
    return float(_tensor(pointer, torch.float32, 1))


def _turned(matrix: Tensor, turns: int) -> Tensor:
    return matrix.t() if turns else matrix
